"""Find the shards that a URL names."""

from __future__ import annotations

from collections.abc import Sequence

from vqclip.data.remote.config import RemoteConfig
from vqclip.data.remote.deadline import Deadline
from vqclip.data.remote.gunzip import TAR_ENDINGS
from vqclip.data.remote.retry import retry
from vqclip.data.remote.shard import RemoteShard
from vqclip.data.remote.transfer import list_urls
from vqclip.data.remote.urls import display_url, protocol_of
from vqclip.errors import DataError

__all__ = ["remote_shards"]


def remote_shards(url: str, options: RemoteConfig, endings: Sequence[str] = TAR_ENDINGS) -> list[RemoteShard]:
    """Return the shard at a URL, or, except at http, the shards of a folder or a glob, sorted by name.

    Args:
        url: without braces. A path in an object store without one of the endings is a folder.
        options: how they are downloaded.
        endings: of the files of a folder.

    Raises:
        DataError: the protocol is not allowed or cannot list folders, or nothing is found.
        StorageError: the store cannot be reached.
    """
    protocol, is_folder = protocol_of(url), False
    if protocol in ("http", "https"):
        path = url.partition("?")[0].partition("://")[2].partition("/")[2]
        if not path or path.endswith("/") or "*" in path or "[" in path or "]" in path:
            raise DataError(
                f"{display_url(url)}: {protocol} cannot list folders; name the shards: {protocol}://host/{{00000..00041}}.tar"
            )
        return [RemoteShard(url, options)]
    if not any(mark in url for mark in "*?["):
        if url.endswith(tuple(endings)):
            return [RemoteShard(url, options)]
        url = f"{url.rstrip('/')}/*"
        is_folder = True
    deadline = Deadline(options.total_s)
    found = retry(lambda: list_urls(url, options.timeout_s, deadline), url, options, deadline)
    found = [name for name in found if name.endswith(tuple(endings)) or not is_folder]
    if not found:
        what = f"files that end in {', '.join(endings)}" if is_folder else "files of these names"
        raise DataError(
            f"{display_url(url)}: matches nothing; expected {what}. Are the names of bucket and folder right?"
        )
    return [RemoteShard(f"{protocol}://{name}", options) for name in sorted(found)]
