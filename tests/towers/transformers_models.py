"""Small random models of transformers in folders, as their own `save_pretrained` writes them."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SIZES | {"vocab_size": 90, "max_position_embeddings": 32}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 90}
MODERN = TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["small", "red", "star", "two", "blue", "circles", "[", "]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPTIONS = ["a red star", "", "two blue circles [SEP] a [PAD] star", "a " * 40]

Made = tuple[str, str, dict[str, Any]]
TEXTS: dict[str, Made] = {
    "bert": ("BertModel", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT),
    "distilbert": ("DistilBertModel", "DistilBertConfig", {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "mpnet": ("MPNetModel", "MPNetConfig", TEXT),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERN),
    "clip": ("CLIPTextModel", "CLIPTextConfig", TEXT | {"max_position_embeddings": 12}),
    "t5_encoder": ("T5EncoderModel", "T5Config", T5),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bert_for_masked_lm": ("BertForMaskedLM", "BertConfig", TEXT),
}
IMAGES: dict[str, Made] = {
    "vit": ("ViTModel", "ViTConfig", VISION),
    "deit": ("DeiTModel", "DeiTConfig", VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", VISION),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "convnext": ("ConvNextModel", "ConvNextConfig", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "swin": ("SwinModel", "SwinConfig", SWIN | {"window_size": 2, "image_size": 32, "patch_size": 4}),
}


def make_network(folder: Path, made: Made) -> Any:
    """Write a random network into a folder, and return it in evaluation mode."""
    kind, config, settings = made
    torch.manual_seed(0)
    return save(getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval(), folder)


def save(network: Any, folder: Path) -> Any:
    """Write a network into a folder without a progress bar, and return it."""
    with contextlib.redirect_stderr(io.StringIO()):
        network.save_pretrained(folder)
    return network


def make_text(folder: Path, name: str = "bert") -> Any:
    """Write a text encoder with a vocabulary of words."""
    network = make_network(folder, TEXTS[name])
    word_pieces().save(str(folder / "tokenizer.json"))
    return network


def make_image(folder: Path, name: str = "vit", mean: float = 0.5) -> Any:
    """Write an image encoder with its normalisation."""
    network = make_network(folder, IMAGES[name])
    settings = {"image_mean": [mean] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return network


def word_pieces() -> Tokenizer:
    """A small vocabulary like BERT's: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3; it cuts and pads to 8 itself."""
    words = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A small vocabulary like T5's, whose marks are among its pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -2.0), ("▁", -3.0), ("b", -3.0)]
    pieces += [(letter, -4.0) for letter in "<>/spad"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<pad>", "</s>", "<unk>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer
