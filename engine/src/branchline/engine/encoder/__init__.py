"""Models that read and do not write: texts in, one vector or one score each out.

Owns their description (`spec`), their arithmetic (`network`, numpy alone) and their queue (`queue`). Knows nothing of
pages, sampling or messages; never imports torch.
"""

from branchline.engine.encoder.network import Network
from branchline.engine.encoder.queue import EncoderQueue, Text, Work
from branchline.engine.encoder.spec import EncoderModel, EncoderSpec, Pooling, is_encoder, load_encoder

__all__ = [
    "EncoderModel",
    "EncoderQueue",
    "EncoderSpec",
    "Network",
    "Pooling",
    "Text",
    "Work",
    "is_encoder",
    "load_encoder",
]
