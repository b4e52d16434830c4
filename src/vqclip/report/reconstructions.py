"""A page of images beside what their ids decode to."""

from __future__ import annotations

from collections.abc import Sequence

from vqclip.evaluation.details import DIFFERENCE_GAIN
from vqclip.evaluation.reconstructions import Reconstructions
from vqclip.report.charts import Curve, line_chart
from vqclip.report.page import render

_LARGE = 112
"""Pixels from which on images are shown larger."""


def reconstructions_page(title: str, found: Reconstructions, facts: Sequence[str], command: str, *, side: int) -> str:
    """Return HTML; all text is escaped.

    Args:
        title: heading.
        found: the images.
        facts: lines below the heading.
        command: command that makes the page again.
        side: side of the images in pixels.
    """
    points = sorted((bits, figures["psnr"]) for _, bits, figures in found.decodings)
    bits, psnr = [bits for bits, _ in points], [psnr for _, psnr in points]
    curve = Curve("ids", bits, psnr)
    chart = line_chart("PSNR against bits", [curve], unit="dB", x_label="bits an image", marks=True)
    return render(
        "reconstructions.html",
        title=title,
        found=found,
        facts=facts,
        chart=chart if len(points) > 1 else None,
        with_ssim=all("ssim" in figures for _, _, figures in found.decodings),
        large=side >= _LARGE,
        gain=DIFFERENCE_GAIN,
        command=command,
    )
