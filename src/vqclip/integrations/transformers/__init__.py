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

from inspect import signature
from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    AutoTokenizer,
)

from vqclip.integrations.transformers.models import (
    VqclipConfig,
    VqclipImageTokenizer,
    VqclipImageTokenizerConfig,
    VqclipImageTokenizerOutput,
    VqclipModel,
    VqclipOutput,
    VqclipTextTokenizer,
    VqclipTextTokenizerConfig,
    VqclipTextTokenizerOutput,
)
from vqclip.integrations.transformers.processing import VqclipImageProcessor, VqclipProcessor, VqclipVocabulary

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

_PROCESSOR: dict[str, Any] = {"slow_image_processor_class": VqclipImageProcessor}
if "image_processor_classes" in signature(AutoImageProcessor.register).parameters:  # version 5 renamed it
    _PROCESSOR = {"image_processor_classes": {"pil": VqclipImageProcessor, "torchvision": VqclipImageProcessor}}
_MODELS: dict[Any, Any] = {
    VqclipConfig: VqclipModel,
    VqclipImageTokenizerConfig: VqclipImageTokenizer,
    VqclipTextTokenizerConfig: VqclipTextTokenizer,
}
for _config, _model in _MODELS.items():
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    if "text" in _config.sections:
        AutoTokenizer.register(_config, slow_tokenizer_class=VqclipVocabulary)
    if "image" in _config.sections:
        AutoImageProcessor.register(_config, **_PROCESSOR)
AutoProcessor.register(VqclipConfig, VqclipProcessor)
AutoModelForZeroShotImageClassification.register(VqclipConfig, VqclipModel)
