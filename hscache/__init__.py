"""hscache: run a frozen language model once, keep its hidden states in a compressed cache.

    import hscache
    cache = hscache.open("/nvme/cache")

Importing this package imports numpy, never torch or transformers.
"""

import hscache.began  # noqa: F401 - first of all, for it notes the time
from hscache.reader import Cache, Document
from hscache.reader import open_cache as open
from hscache.shard import Shard

__version__ = "0.1.0"

__all__ = ["Cache", "Document", "Shard", "__version__", "open"]
