"""Files at URLs: which URLs are allowed, reading and listing with retries, the cache of chunks, folders to write to."""
