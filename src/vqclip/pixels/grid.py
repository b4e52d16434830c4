"""The grid of an image's tokens, and the stages between it and the pixels."""

from __future__ import annotations

import math

from vqclip.errors import ConfigError

__all__ = ["pixels_per_token", "prime_factors", "require_groups"]


def pixels_per_token(num_tokens: int, image_size: int) -> int:
    """Return the height and width in pixels of a token's part of the image.

    Raises:
        ConfigError: the tokens are no square grid, or do not divide the image.
    """
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or image_size % side:
        raise ConfigError(
            f"pixels: got {num_tokens} tokens for images of {image_size} x {image_size} pixels; expected a square grid "
            "of tokens whose side divides the image's"
        )
    return image_size // side


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number``, largest first."""
    factors, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            factors.append(factor)
            number //= factor
    return factors[::-1]


def require_groups(channels: int, max_channels: int, channels_per_group: int) -> None:
    """Raise ValueError unless the groups of a normalisation divide the channels."""
    if channels % channels_per_group or max_channels % channels_per_group:
        raise ValueError(
            f"got channels {channels}, max_channels {max_channels} and channels_per_group {channels_per_group}; "
            "expected channels that are multiples of channels_per_group"
        )
