"""Token shards: Parquet files of ids instead of pixels and text, and the data set that reads them.

`vqclip.tokenize_dataset` writes them. docs/adr/0019 and 0047 describe the folder.
"""
