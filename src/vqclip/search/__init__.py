"""Search by codes: an index that contains only ids and names, and exact scores of a query against them.

    index = CodeIndex.build(tokenizer, ids, names)             # ids from tokenizer.encode
    result = CodeSearch(index, tokenizer).search(queries, 10)  # queries: (Q, E) unit-norm, of either modality
    index.save("images.index")                                 # codes.safetensors and index.json

    vectors = embeddings(index, tokenizer)                     # (n, E), for databases of vectors

On the command line: ``vqclip search --help``. `FaissSearch` needs ``pip install 'vqclip[search]'``.

After `vqclip.tokenizer`, which makes and embeds the ids; before `vqclip.cli`.
"""

from vqclip.search.index import CodeIndex, Packing
from vqclip.search.scan import CodeSearch, FaissSearch, SearchResult, embeddings

__all__ = ["CodeIndex", "CodeSearch", "FaissSearch", "Packing", "SearchResult", "embeddings"]
