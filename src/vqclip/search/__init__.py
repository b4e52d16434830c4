"""Search by codes: an index that holds ids and nothing else, and exact scores of a query against them.

    index = CodeIndex.build(tokenizer, ids, names)           # ids as tokenizer.encode gives them
    found = CodeSearch(index, tokenizer).search(queries, 10)  # queries: (Q, E) unit-norm, of either modality
    index.save("pictures.index")                              # codes.safetensors and index.json

On the command line: ``vqclip search --help``. `FaissSearch` needs ``pip install 'vqclip[search]'``.
"""

from vqclip.search.index import CodeIndex
from vqclip.search.packing import Packing
from vqclip.search.scan import CodeSearch, Found
from vqclip.search.vectors import FaissSearch

__all__ = ["CodeIndex", "CodeSearch", "FaissSearch", "Found", "Packing"]
