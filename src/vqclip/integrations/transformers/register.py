"""Registration with the Auto classes of transformers."""

from __future__ import annotations

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

from vqclip.integrations.transformers.config import (
    VqclipConfig,
    VqclipImageTokenizerConfig,
    VqclipTextTokenizerConfig,
)
from vqclip.integrations.transformers.model import VqclipModel
from vqclip.integrations.transformers.processing import VqclipImageProcessor, VqclipProcessor, VqclipVocabulary
from vqclip.integrations.transformers.tokenizers import VqclipImageTokenizer, VqclipTextTokenizer

_MODELS: dict[Any, Any] = {
    VqclipConfig: VqclipModel,
    VqclipImageTokenizerConfig: VqclipImageTokenizer,
    VqclipTextTokenizerConfig: VqclipTextTokenizer,
}


def register() -> None:
    """Register all classes with the Auto classes; called once, when the package is imported."""
    for config, model in _MODELS.items():
        AutoConfig.register(config.model_type, config)
        AutoModel.register(config, model)
        if "text" in config.sections:
            AutoTokenizer.register(config, slow_tokenizer_class=VqclipVocabulary)
        if "image" in config.sections:
            AutoImageProcessor.register(config, **_processor_classes())
    AutoProcessor.register(VqclipConfig, VqclipProcessor)
    AutoModelForZeroShotImageClassification.register(VqclipConfig, VqclipModel)


def _processor_classes() -> dict[str, Any]:
    """Return the arguments of ``AutoImageProcessor.register``, which version 5 renamed."""
    if "image_processor_classes" in signature(AutoImageProcessor.register).parameters:
        return {"image_processor_classes": {"pil": VqclipImageProcessor, "torchvision": VqclipImageProcessor}}
    return {"slow_image_processor_class": VqclipImageProcessor}
