"""``vqclip tokenize``: image-text shards to token shards."""
