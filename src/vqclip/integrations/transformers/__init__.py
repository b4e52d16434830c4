"""vqclip's tokenizers and models as classes of Hugging Face's transformers (``pip install 'vqclip[transformers]'``).

    from vqclip.integrations.transformers import VqclipImageProcessor, VqclipImageTokenizer

    processor = VqclipImageProcessor.from_pretrained("runs/base/tokenizer")
    tokenizer = VqclipImageTokenizer.from_pretrained("runs/base/tokenizer")
    codes = tokenizer.encode(**processor(images)).image_codes  # (B, N, C) int64

Importing this module registers the classes with ``AutoConfig``, ``AutoModel``, ``AutoImageProcessor``,
``AutoProcessor``, ``AutoTokenizer`` and ``AutoModelForZeroShotImageClassification``. Folders are those of
`vqclip.tokenizer.folder`, read by its strict reader: ``save_pretrained`` writes one that `vqclip.load_tokenizer` reads
too. Nothing in a folder is executed.
"""

from vqclip.errors import ConfigError

try:
    import transformers as _  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"vqclip.integrations.transformers needs the package transformers, which is not installed ({error}); "
        "pip install 'vqclip[transformers]'"
    ) from error

from vqclip.integrations.transformers.config import (
    VqclipConfig,
    VqclipImageTokenizerConfig,
    VqclipTextTokenizerConfig,
)
from vqclip.integrations.transformers.model import VqclipModel, VqclipOutput
from vqclip.integrations.transformers.processing import VqclipImageProcessor, VqclipProcessor, VqclipVocabulary
from vqclip.integrations.transformers.register import register
from vqclip.integrations.transformers.tokenizers import (
    VqclipImageTokenizer,
    VqclipImageTokenizerOutput,
    VqclipTextTokenizer,
    VqclipTextTokenizerOutput,
)

__all__ = [
    "VqclipConfig",
    "VqclipImageProcessor",
    "VqclipImageTokenizer",
    "VqclipImageTokenizerConfig",
    "VqclipImageTokenizerOutput",
    "VqclipModel",
    "VqclipOutput",
    "VqclipProcessor",
    "VqclipTextTokenizer",
    "VqclipTextTokenizerConfig",
    "VqclipTextTokenizerOutput",
    "VqclipVocabulary",
]

register()
