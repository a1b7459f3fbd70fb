"""A layer of a ``PagedCache``, as transformers lists it."""

from transformers.cache_utils import CacheLayerMixin


class PagedLayer(CacheLayerMixin):
    """A layer of a ``PagedCache`` as transformers lists it: flags only, the cache itself answers for all layers.

    It does not refer to the cache: in a cycle, pools would outlive their last use until Python collects garbage.
    """

    is_compileable = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, is_sliding: bool):
        super().__init__()
        self.is_sliding = is_sliding

    def _refuse_tokens(self, *args, **kwargs):
        raise ValueError("PagedCache serves models after replace_attention(model); this model's attention is stock")

    def _refuse_offload(self):
        raise ValueError("PagedCache cannot be offloaded")

    def _refuse_alone(self, *args, **kwargs):
        raise ValueError("a layer of a PagedCache cannot be asked alone; ask the cache")

    lazy_initialization = update = update_indexer = _refuse_tokens
    offload = prefetch = _refuse_offload
    get_seq_length = get_mask_sizes = get_max_length = reset = reorder_cache = _refuse_alone
