"""Reading of shards in chunks of consecutive samples, for data that do not fit on a disk."""
