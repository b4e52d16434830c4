"""Towers of transformers: any encoder that `AutoModel` loads from safetensors, with its own vocabulary.

    folder or hub name ── folder.py ──> configuration, tokenizer.json, preprocessor_config.json   (data, checked here)
                       └─ network.py ─> the module with its weights
                          vocabulary.py, text.py, image.py: captions and pixels to features

No code of a model is executed and no pickle is opened. `transformers` is imported when a tower is built.
"""

from vqclip.towers.huggingface.image import TransformersImageTowerConfig
from vqclip.towers.huggingface.text import TransformersTextTowerConfig

__all__ = ["TransformersImageTowerConfig", "TransformersTextTowerConfig"]
