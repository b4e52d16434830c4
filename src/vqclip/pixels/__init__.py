"""Pixels back: from the vectors of an image's codes to the image. After the towers; before the tokenizer."""
