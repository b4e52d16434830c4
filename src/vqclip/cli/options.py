"""Arguments of every command: one function each, whose docstring is the command's help.

The same thing has the same name in each command: ``--out``, ``--device``, ``--data`` with paths and ``key=value``.
Nothing here imports torch, so help and refusals come at once; a default that is stated twice is compared by a test.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable

from vqclip.cli import arguments as types
from vqclip.cli import data_options

__all__ = ["make_parser"]

_TOKENIZER = "tokenizer folder, or hub name (owner/name)"
_MODEL = (
    "run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer folder, or "
    "hub name (owner/name)"
)
_SPLIT = "its folder of tars; needed where there are several, since none is the default"
_WEIGHTS = "averaged: the moving average of the weights, where there is one (train.ema); current: those of the step"
_DEVICE = "cpu, cuda, cuda:1, ...; auto: a GPU if there is one (%(default)s)"
_BAD_FRACTION = "largest share of unusable images; they are left out (%(default)s)"


def make_parser(name: str, summary: str, words: str) -> types.Parser:
    """Return the parser of a command.

    Args:
        name: its words, such as ``data pack``.
        summary: its description in one line, for commands whose function has no docstring.
        words: lines that describe the words that may follow the name; empty for none.
    """
    add = _PARSERS[name]
    about, _, examples = (inspect.getdoc(add) or f"{summary[0].upper()}{summary[1:]}.").partition("\n\nExamples:\n")
    if words:
        about += f"\n\na task may follow:\n\n{words}"
    parser = types.Parser(
        prog=f"vqclip {name}",
        description=about,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not name.startswith("clip-benchmark"),
    )
    add(parser)
    return parser


def _train(parser: argparse.ArgumentParser) -> None:
    """Train image and text tokenizers together.

    Examples:
      vqclip train --config configs/base.yaml run.name=mine optim.lr=1e-3
      torchrun --standalone --nproc-per-node 2 -m vqclip train --config configs/base.yaml
    """
    add = parser.add_argument
    # torchrun takes options that begin like one of its own (--log..., --n..., --max...), so ours have other names.
    add("--config", type=types.path, help="YAML file, such as configs/base.yaml")
    add("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    add("--print-config", action="store_true", help="print the resolved configuration and stop")
    add("--json-schema", action="store_true", help="print a JSON schema for editors and stop")


def _plan(parser: argparse.ArgumentParser) -> None:
    """Say what a training step needs before it runs: memory of a GPU by part, and bytes of every exchange.

    Needs neither a GPU nor the data nor other processes. ``vqclip data plan`` does the same for the data. Exit status:
    0 if the step fits, or without --memory; 1 if it does not, or for an error; 2 for an invalid configuration.

    Examples:
      vqclip plan configs/vit_b16.yaml train.batch_size=32768 --gpus 64 --memory 80
    """
    add, number = parser.add_argument, types.whole(1, 2**20)
    add("config", type=types.path, metavar="CONFIG", help="training configuration, such as configs/vit_b16.yaml")
    add("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    add("--gpus", type=number, default=1, metavar="N", help="GPUs, and processes, of the job (%(default)s)")
    add("--gpus-per-machine", type=number, default=8, metavar="N", help="for train.parallel: hsdp (%(default)s)")
    add("--memory", type=types.positive, metavar="GIB", help="of a GPU; without it nothing is compared")
    add("--reserve", type=types.not_negative, default=4.0, metavar="GIB", help="for what is not counted (%(default)g)")
    add("--json", action="store_true", help="print the figures as JSON, in bytes")


def _tokenize(parser: argparse.ArgumentParser) -> None:
    """Turn image-text shards into token shards with captions and sample ids, one for each input shard.

    Run the same command again to continue after a stop. docs/reuse.md describes the files that it writes.

    Examples:
      vqclip tokenize --tokenizer runs/base/tokenizer --data '/datasets/mine/{00000..00999}.tar' --out tokens/mine
      vqclip tokenize --tokenizer runs/eurosat/tokenizer --data /datasets/cls_eurosat split=train --out tokens/eurosat
      torchrun --standalone --nproc-per-node 8 -m vqclip tokenize --tokenizer ... --data ... --out ...
      vqclip tokenize --engine ray --ray-address auto --tokenizer ... --data 's3://bucket/{00000..09999}.tar' --out ...
    """
    add = parser.add_argument
    add("--tokenizer", type=types.text, required=True, metavar="FOLDER", help=_TOKENIZER)
    help_text = (
        "data set: a folder, table, tar, pattern or URL; several may follow, or repeat the option; and key=value of "
        "its configuration in data.sources, such as captions=text, json_keys=[long,short] or split=train"
    )
    add("--data", type=types.text, required=True, nargs="+", action="extend", metavar="PATTERN", help=help_text)
    add("--out", required=True, type=types.path, metavar="FOLDER", help="folder of the token shards and manifest.json")
    add("--modality", choices=("image", "text", "both"), default="both", help="data to tokenize (%(default)s)")
    help_text = "samples in a batch; the last batch of a shard is padded (%(default)s)"
    add("--batch-size", type=types.batch_size, default=64, help=help_text)
    help_text = "worker processes that decode images, for each process of the job (%(default)s)"
    add("--workers", type=types.workers, default=0, help=help_text)
    help_text = (
        "fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times "
        "slower, but batch size, threads and machine change ids about half a billion times less often (%(default)s)"
    )
    add("--precision", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help=help_text)
    help_text = "auto: a GPU if there is one (%(default)s)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=help_text)
    help_text = "threads of each process on the CPU; more processes are faster than more threads (%(default)s)"
    add("--threads", type=types.threads, default=1, help=help_text)
    help_text = "largest share of samples that may be unusable; they are left out (%(default)s)"
    add("--tolerance", type=types.share, default=0.01, help=help_text)
    types.add_engine(parser)


def _search_build(parser: argparse.ArgumentParser) -> None:
    """Make an index of the codes of images or captions.

    Examples:
      vqclip search build --tokenizer runs/captions/tokenizer --images path/to/images --out images.index
    """
    add = parser.add_argument
    add("--tokenizer", type=types.text, required=True, help=_TOKENIZER)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--images", type=types.text, help="images to index: a folder, tars, or clip_benchmark's layout")
    what.add_argument("--captions", type=types.text, help="data whose captions to index, in the same forms")
    add("--split", help=f"of labelled data: {_SPLIT}")
    add("--out", type=types.path, required=True, help="folder of the index")
    add("--batch-size", type=types.batch_size, default=64, help="images or captions at once (%(default)s)")
    add("--bad-fraction", type=types.share, default=0.01, help=_BAD_FRACTION)


def _search_query(parser: argparse.ArgumentParser) -> None:
    """Search an index by words or an image.

    Examples:
      vqclip search query --index images.index "a red apple" --images path/to/images --html page.html
      vqclip search query --index images.index --image apple.png
    """
    add = parser.add_argument
    add("--index", type=types.path, required=True, help="folder of the index")
    add("--tokenizer", type=types.text, help="that the index was built with (its folder at that time)")
    add("--images", type=types.text, help="images that the index was built from; for --html")
    add("text", type=types.text, nargs="?", help="text to search for")
    add("--image", type=types.path, help="image to search for instead of a text")
    add("-k", type=types.count, default=24, help="number of results (%(default)s)")
    add("--continuous", action="store_true", help="do not quantize the query")
    add("--html", type=types.path, help="write a page with the images of --images to this file")


def _export(parser: argparse.ArgumentParser) -> None:
    """Export a tokenizer to ONNX, and compare the ids of the files with its own; or towers to open_clip.

    Without --data the comparison uses random inputs: noise images, or captions of six words. --open-clip writes the
    towers of both tokenizers back into the open_clip model that they came from. The joint embedding of vqclip is no
    part of it; vqclip.integrations.open_clip gives any folder the methods of an open_clip model.

    Examples:
      vqclip export runs/base/tokenizer --modality image --out onnx/image --data path/to/cls_eurosat --split test
      vqclip export runs/base/tokenizer --modality text --out onnx/text --data 'val/{00000..00003}.tar'
      vqclip export --open-clip runs/base --out towers
    """
    add = parser.add_argument
    add("tokenizer", type=types.text, help=_TOKENIZER)
    add("--modality", choices=("image", "text"), help="tokenizer to export")
    add("--out", type=types.path, required=True, help="folder of the ONNX files, or of the model")
    add("--open-clip", action="store_true", help="write both towers into an open_clip model")
    help_text = "with --open-clip: tag or file of the weights that the towers started from (what config.yaml names)"
    add("--base", type=types.text, help=help_text)
    help_text = (
        "arithmetic of the files (fp32); fp64: everything in float64, several times slower, with ids that differ "
        "from torch's about half a billion times less often"
    )
    add("--precision", choices=("fp32", "fp64"), help=help_text)
    help_text = "write nothing; compare the ONNX files that are already in --out"
    add("--compare-only", action="store_true", help=help_text)
    help_text = "images or captions to compare on: folder, tars, or clip_benchmark's layout"
    add("--data", type=types.text, help=help_text)
    add("--split", help=f"of labelled data: {_SPLIT}")
    add("--batch-size", type=types.batch_size, default=50, help="batch size of the comparison (%(default)s)")
    add("--limit", type=types.count, help="compare at most this number of inputs, evenly spread")
    add("--program", action="store_true", help="compare programs of torch.export as well")


def _export_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=types.path, help="the run's folder, such as runs/base")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=types.whole(0, 2**63 - 1), help="step of the checkpoint (the newest)")
    which.add_argument("--best", action="store_true", help="take the best checkpoint; see train.keep_best")
    add("--out", type=types.path, help="folder to write (tokenizer-step-<step> in the run's folder)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=_WEIGHTS)


def _reconstruct(parser: argparse.ArgumentParser) -> None:
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
    add = parser.add_argument
    add("tokenizer", type=types.text, help="tokenizer folder with a pixel decoder, or hub name (owner/name)")
    help_text = "images: a folder of image files, a table, tars, a pattern or URL, and keys of the kind, as kind=csv"
    metavar = ("PATH", "key=value")
    add("--data", type=types.text, required=True, nargs="+", action="extend", metavar=metavar, help=help_text)
    add("--split", help=f"of data with several: {_SPLIT}")
    add("-o", "--output", type=types.path, required=True, metavar="FILE", help="the page")
    add("--force", action="store_true", help="replace an existing page")
    add("--images", type=types.whole(1, 10_000), default=256, help="images that are drawn and decoded (%(default)s)")
    add("--seed", type=types.whole(0, 2**63 - 1), default=0, help="seed of the draw (%(default)s)")
    help_text = "images of each of worst, median and best on the page (%(default)s)"
    add("--show", type=types.whole(1, 32), default=4, help=help_text)
    help_text = "largest side of an image on the page, in pixels; PSNR is always of the full size (%(default)s)"
    add("--side", type=types.whole(16, 512), default=256, help=help_text)
    help_text = "images in a batch (%(default)s)"
    add("--batch-size", type=types.batch_size, default=256, help=help_text)
    help_text = "worker processes that decode images; 0: this process (%(default)s)"
    add("--workers", type=types.workers, default=0, help=help_text)
    add("--bad-fraction", type=types.share, default=0.01, help=_BAD_FRACTION)
    add("--device", type=types.text, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")


def _report(parser: argparse.ArgumentParser) -> None:
    """Write the page of a run: figures, curves, codes on images, and a verdict; or one page that compares several.

    The page is one file that needs no network and runs no script. Neither the model nor the data is read.

    Examples:
      vqclip report runs/base
      vqclip report runs/small runs/large --output comparison.html
    """
    add = parser.add_argument
    add("runs", type=types.path, nargs="+", metavar="RUN", help="folder of a run, such as runs/base")
    add("--output", type=types.path, metavar="FILE", help="the page; for one run report.html in its folder")


def _demo(parser: argparse.ArgumentParser) -> None:
    """Show in the browser what a tokenizer makes of an image or a caption.

    Ids, bits, the probabilities of classes, and the nearest items of an index. Needs pip install 'vqclip[demo]'.
    """
    add = parser.add_argument
    add("folder", type=types.text, help=f"{_MODEL}; one modality is enough")
    add("--index", type=types.path, help="index of vqclip search build, whose nearest items are shown")
    add("--images", type=types.text, help="images that the index was built from, to show them")
    add("--host", type=types.text, default="127.0.0.1", help="address to listen on; others open the page to a network")
    add("--port", type=types.whole(0, 65535), default=7860, help="port; 0: any that is free (%(default)s)")
    add("--device", type=types.text, default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    add("--threads", type=types.threads, help="threads of the CPU (all cores)")


def _copy_run(parser: argparse.ArgumentParser) -> None:
    """Copy a run whose run.folder is a URL: its files, and its newest checkpoint, verified."""
    parser.add_argument("url", help="of the run, such as s3://bucket/runs/base")
    parser.add_argument("folder", type=types.path, help="folder to write, such as runs/base")


def _clip_benchmark_eval(parser: argparse.ArgumentParser) -> None:
    """Evaluate models with clip_benchmark, on its data sets, by its own command.

    Options that are not listed are those of clip_benchmark (clip_benchmark eval --help). It is run once for each model,
    with --model_type vqclip, and with --no_amp, so that its logits are in fp32 as those of vqclip evaluate.

    Examples:
      vqclip clip-benchmark eval --pretrained runs/eurosat --dataset wds/eurosat --dataset_root data/cls_eurosat
      vqclip clip-benchmark build eurosat_*.json --output benchmark.csv
    """
    add = parser.add_argument
    add("--pretrained", type=types.text, nargs="+", required=True, metavar="MODEL", help=f"one or several: {_MODEL}")
    help_text = "quantizers bypassed, the training path, or embeddings of stored ids (continuous codes_only)"
    modes = ("continuous", "quantized", "codes_only")
    add("--model", nargs="+", choices=modes, default=["continuous", "codes_only"], help=help_text)
    help_text = "autocast type of the model (%(default)s)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=help_text)
    add("--weights", choices=("averaged", "current"), default="averaged", help=_WEIGHTS)
    add("--model_type", choices=("vqclip",), help=argparse.SUPPRESS)
    help_text = (
        "zeroshot_classification, zeroshot_retrieval, image_caption_selection, linear_probe, or auto: by the name of "
        "the data set, classification for unknown ones (%(default)s)"
    )
    add("--task", dest="kind", type=types.text, default="auto", help=help_text)
    help_text = "worker processes that read data; at most as many as a webdataset has shards (%(default)s)"
    add("--num_workers", type=types.workers, default=1, help=help_text)
    default, help_text = "{dataset}_{pretrained}_{model}_{language}_{task}.json", "file of the results; names in braces"
    add("--output", type=types.text, default=default, help=f"{help_text} are filled in (%(default)s)")


def _clip_benchmark_build(parser: argparse.ArgumentParser) -> None:
    """Make one table of the results of eval, by clip_benchmark's own command."""
    parser.add_argument("files", nargs="+", help="results of eval")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    """Evaluate a trained model: continuous, quantized and codes-only figures beside chance.

    Without a task before the model: those of a run's own configuration, or of a file with a list `evaluation:` as in
    one, in one table. Accuracy against bits: of prefixes of the ids (the first stages of a residual quantizer, or
    codebooks of a product one), and of several models; those that differ only in their seed are one line. On several
    processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip evaluate ...

    Examples:
      vqclip evaluate runs/base
      vqclip evaluate runs/base --config tasks.yaml --csv figures.csv
      vqclip evaluate runs/base --prefixes full --plot bits.html
      vqclip evaluate zero-shot runs/eurosat --data path/to/cls_eurosat
      vqclip evaluate zero-shot runs/few-seed-* runs/many-seed-* --prefixes none --data path/to/cls_eurosat
      vqclip evaluate retrieval runs/base --data val.csv
      vqclip evaluate linear-probe runs/eurosat --data path/to/cls_eurosat
    """
    add = parser.add_argument
    help_text = f"{_MODEL}; then changes to the file, such as evaluation[0].key=value"
    add("models", type=types.text, nargs="+", metavar="MODEL", help=help_text)
    add("--config", type=types.path, help="YAML file with a list evaluation: (the first run's config.yaml)")
    _add_evaluation(parser)


def _evaluate_task(parser: argparse.ArgumentParser) -> None:
    """Run one task on data of its own.

    The keys of a task, which follow the model as key=value:

    all           batch_size, workers, limit (images, evenly spread), max_bad_fraction, timeout_s
    zero-shot     templates (prompts with {c} for the class), templates_file, classes_file
    linear-probe  train (its path, split, ...; the split train of the data), train_limit, features, l2
    knn           train, train_limit, features, neighbours, temperature

    Examples:
      vqclip evaluate zero-shot runs/base --data kind=scenes
      vqclip evaluate zero-shot runs/base templates='["a photo of a {c}"]' --data path/to/folder_of_class_folders
      vqclip evaluate retrieval runs/base limit=1000 --data "val/{00000..00003}.tar" captions=json json_keys=[caption]
      vqclip evaluate knn runs/eurosat neighbours=5 train.path=path/to/others --data path/to/cls_eurosat split=test
    """
    add = parser.add_argument
    add("models", type=types.text, nargs="+", metavar="MODEL", help=f"{_MODEL}; then key=value of the task")
    help_text = (
        "file, folder, pattern or URL; others of the same data set may follow, and keys of its kind, such as kind=csv; "
        "repeat the option for several data sets"
    )
    add("--data", type=types.text, nargs="+", action="append", metavar=("PATH", "key=value"), help=help_text)
    add("--split", help='split, where the data have several; the subfolder of a folder of classes ("test" for classes)')
    _add_evaluation(parser)


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", type=types.text, default="auto", help=_DEVICE)
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast type (%(default)s)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=_WEIGHTS)
    add("--codes", type=types.path, help="keep the ids (safetensors) in this folder")
    add("--json", type=types.path, help="write the results to this file")
    add("--csv", type=types.path, help="write a row for each data set, mode and figure to this file")
    help_text = (
        "accuracy against bits, of prefixes of the images' ids: texts keep all of theirs (full), or the same share "
        "(same); none: all ids alone, to compare several models (none)"
    )
    add("--prefixes", choices=("full", "same", "none"), help=help_text)
    add("--plot", type=types.path, metavar="FILE.html", help="draw accuracy against bits on this page")


_PARSERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    **data_options.PARSERS,
    "train": _train,
    "plan": _plan,
    "evaluate": _evaluate,
    "evaluate zero-shot": _evaluate_task,
    "evaluate retrieval": _evaluate_task,
    "evaluate linear-probe": _evaluate_task,
    "evaluate knn": _evaluate_task,
    "evaluate pixels": _evaluate_task,
    "tokenize": _tokenize,
    "search build": _search_build,
    "search query": _search_query,
    "export": _export,
    "reconstruct": _reconstruct,
    "report": _report,
    "demo": _demo,
    "export-tokenizer": _export_tokenizer,
    "copy-run": _copy_run,
    "clip-benchmark eval": _clip_benchmark_eval,
    "clip-benchmark build": _clip_benchmark_build,
}
