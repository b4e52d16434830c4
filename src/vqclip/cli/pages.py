"""Commands that show something: ``vqclip report``, ``reconstruct`` and ``demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vqclip.cli.options import (
    MODEL,
    SPLIT,
    BadFraction,
    BatchSize,
    Command,
    LocalPath,
    Text,
    Workers,
    paths_and_overrides,
    require_page,
)
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    from vqclip.data import SourceConfigBase

__all__ = ["Demo", "Reconstruct", "Report"]


class Report(Command, words=("runs",)):
    """Write the page of a run: figures, curves, codes on images, and a verdict; or one page that compares several.

    The page is one file that needs no network and runs no script. Neither the model nor the data is read.

    Examples:
      vqclip report runs/base
      vqclip report runs/small runs/large --output comparison.html
    """

    runs: tuple[LocalPath, ...] = Field(min_length=1)
    """Folder of a run, such as runs/base; several are compared."""
    output: LocalPath | None = None
    """The page; for one run report.html in its folder."""

    def run(self) -> None:
        """Write the page."""
        from vqclip.report import write_comparison, write_report

        runs, output = self.runs, self.output
        if output is not None:
            require_page("--output", output)
        try:
            if len(runs) == 1:
                path = write_report(runs[0], output)
            elif output is not None:
                path = write_comparison(runs, output)
            else:
                wanted = f"expected a file for the comparison of {len(runs)} runs, such as comparison.html"
                raise ConfigError(f"--output: missing, {wanted}")
        except OSError as error:
            raise ConfigError(f"--output: {error.filename or output}: cannot be written ({error.strerror})") from error
        print_output(f"{path}: {path.stat().st_size:,} bytes; open it in a browser")


class Reconstruct(Command, words=("tokenizer",)):
    """Write a page of images beside what their ids decode to: originals, reconstructions, differences.

    The tokenizer needs a pixel decoder. Images are drawn from the data by --seed; of these, the page shows the worst,
    median and best by PSNR, each decoded from its first residual stages and codebooks, and from all ids. The page is
    one file that needs no network and runs no script.

    Examples:
      vqclip reconstruct runs/pixels/tokenizer --data path/to/images -o page.html
      vqclip reconstruct runs/pixels/tokenizer --data "val/{0..3}.tar" captions=json json_keys=[caption] -o page.html
      vqclip reconstruct runs/pixels/tokenizer --data path/to/cls_eurosat --split test -o page.html
      vqclip reconstruct runs/pixels/tokenizer --data kind=scenes split=val -o page.html
    """

    tokenizer: Text
    """Tokenizer folder with a pixel decoder, or hub name (owner/name)."""
    data: tuple[Text, ...]
    """Images: a folder of image files, a table, tars, a pattern or URL, and keys of the kind, as kind=csv."""
    split: str | None = Field(None, description=f"Of data with several: {SPLIT}")
    output: LocalPath
    """The page."""
    force: bool = False
    """Replace an existing page."""
    images: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Images that are drawn and decoded."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the draw."""
    show: Annotated[int, Field(ge=1, le=32)] = 4
    """Images of each of worst, median and best on the page."""
    side: Annotated[int, Field(ge=16, le=512)] = 256
    """Largest side of an image on the page, in pixels; PSNR is always of the full size."""
    batch_size: BatchSize = 256
    """Images in a batch."""
    workers: Workers = 0
    """Worker processes that decode images; 0: this process."""
    bad_fraction: BadFraction = 0.01
    """Largest share of unusable images; they are left out."""
    device: Text = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one."""

    def run(self) -> None:
        """Write the page."""
        import contextlib
        import shlex

        from vqclip import dist
        from vqclip.data import mask_credentials, open_source
        from vqclip.data.workers import explain_worker_deaths
        from vqclip.evaluation.reconstructions import DrawnSource, reconstruct
        from vqclip.io.atomic import write_text
        from vqclip.report.page import reconstructions_page
        from vqclip.tokenizer.loading import load_tokenizer

        require_page("--output", self.output, replace=self.force)
        tokenizer = load_tokenizer(self.tokenizer, "image").to(dist.choose_device(self.device, "--device"))
        if tokenizer.pixels is None:
            raise ConfigError(
                f"{self.tokenizer}: has no pixel decoder; expected the tokenizer folder of a run that has trained one, "
                "with `task: pixels` or with model.image.pixels"
            )
        drawn = DrawnSource(open_source(self._source()), self.images, self.seed)
        reading = {"batch_size": self.batch_size, "workers": self.workers, "max_bad_fraction": self.bad_fraction}
        with explain_worker_deaths("reconstruct") if self.workers else contextlib.nullcontext():
            found = reconstruct(tokenizer, drawn, self.show, self.side, **reading)
        place, shown = (mask_credentials(each) for each in (self.tokenizer, " ".join(self.data)))
        facts = [f"{found.images:,} images of {shown}, drawn by seed {self.seed}", f"tokenizer {place}"]
        if found.bad:
            facts.append(f"{found.bad:,} images cannot be used and are left out")
        side = min(self.side, tokenizer.pixels.image_size)
        repeat = mask_credentials(shlex.join(["vqclip", "reconstruct", *self.given]))
        write_text(self.output, reconstructions_page(f"Reconstructions of {shown}", found, facts, repeat, side=side))
        _, bits, figures = found.decodings[-1]
        print_output(
            f"{self.output}: {found.images:,} images, {bits:,.0f} bits an image, PSNR {figures['psnr']:.2f} dB; "
            f"{self.output.stat().st_size:,} bytes; open it in a browser"
        )

    def _source(self) -> SourceConfigBase:
        from vqclip.data import parse_source
        from vqclip.data.sources.class_names import CLASSNAMES
        from vqclip.data.sources.kinds import find_kind

        paths, overrides = paths_and_overrides(self.data)
        defaults: dict[str, str] = {}
        if any((Path(path).expanduser() / CLASSNAMES).is_file() for path in paths):
            defaults["kind"] = "classes"
        elif paths and not any(each.startswith("kind=") for each in overrides) and find_kind(paths) == "folder":
            defaults |= {"kind": "folder", "captions": "names"}  # every image, with captions or without
        data = parse_source(paths, overrides, split=self.split, **defaults)
        data.require_no_weight("vqclip reconstruct")
        return data


class Demo(Command, words=("folder",)):
    """Show in the browser what a tokenizer makes of an image or a caption.

    Ids, bits, the probabilities of classes, and the nearest items of an index. Needs pip install 'vqclip[demo]'.
    """

    folder: Text = Field(description=f"{MODEL}; one modality is enough")
    index: LocalPath | None = None
    """Index of vqclip search build, whose nearest items are shown."""
    images: Text | None = None
    """Images that the index was built from, to show them."""
    host: Text = "127.0.0.1"
    """Address to listen on; others open the page to a network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """Port; 0: any that is free."""
    device: Text = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of the CPU; all cores without it."""

    def run(self) -> None:
        """Serve the page until Ctrl-C."""
        import torch

        from vqclip import dist
        from vqclip.demo.answers import Answers
        from vqclip.demo.page import serve

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        answers = Answers.load(self.folder, self.index, self.images, dist.choose_device(self.device, "--device"))
        if self.host not in ("127.0.0.1", "localhost", "::1"):
            who = "everyone who can reach this machine can use the page, and see what --index and --images show"
            print(f"vqclip demo: warning: --host {self.host}: {who}; there is no password", file=sys.stderr)

        def ready(address: str) -> None:
            print_output(f"Open {address} in a browser. Ctrl-C stops the demo.")

        serve(self.folder, answers, self.host, self.port, ready)
