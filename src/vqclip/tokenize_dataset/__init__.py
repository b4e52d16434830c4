"""``vqclip tokenize``: turn image-text shards into token shards.

After `vqclip.data`, which reads samples and writes token shards, and `vqclip.tokenizer`, which encodes; before
`vqclip.cli`.
"""
