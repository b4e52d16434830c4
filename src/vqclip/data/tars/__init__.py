"""Tars: headers, members, the index, the cache of chunks, the reader, and fetching ahead; for both orders."""
