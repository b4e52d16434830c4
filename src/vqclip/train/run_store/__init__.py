"""A run folder in an object store: its files, the lease of the job that writes them, and the copy on rank 0's disk.

checkpoints are saved on rank 0's disk  ->  uploaded, manifest last  ->  old ones are removed at the URL
start: take the lease  ->  fetch the files of the run and its newest checkpoint, unless this disk has them
"""

from vqclip.data.remote.folder import RemoteFolder, require_writable
from vqclip.train.run_store.copying import copy_run
from vqclip.train.run_store.mirror import RunMirror

__all__ = ["RemoteFolder", "RunMirror", "copy_run", "require_writable"]
