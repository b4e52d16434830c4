"""Making of details: hits and misses, classes, code maps, patches that share a code.

Shapes: n images of the set, m some of them, Q queries, M candidates, N tokens, C codebooks, K classes, E embedding
width.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from vqclip.errors import StopRequested, count_noun
from vqclip.evaluation.details import (
    MAX_CLASSES,
    MAX_CODEBOOKS,
    MAX_CONFUSED,
    Card,
    Details,
    DetailsConfig,
    ImageReader,
    Item,
    Mode,
    Section,
    Table,
    clip_text,
    code_map,
    exact_thumbnail,
    find_grid,
)
from vqclip.evaluation.encode import Encoded, Encoder, RankPartition, load_ids
from vqclip.evaluation.images import EncodedImages
from vqclip.evaluation.ranking import SAME, Ranks
from vqclip.evaluation.reconstructions import pixel_transform, show_reconstruction
from vqclip.evaluation.results import MODE_TITLES, percent
from vqclip.quantizers import Quantizer
from vqclip.tokenizer import ImageTokenizer

logger = logging.getLogger(__name__)

Direction = Literal["image to caption", "caption to image", "image to class"]
"""Query and candidates."""


def make_details(
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    images: EncodedImages,
    names: Sequence[str],
    make: Callable[[ImageDetails], Details],
) -> Details | None:
    """Return the details of a task on rank 0, if the encoder makes them; every rank must call this.

    If they cannot be made, the log says why: an evaluation is worth more than its report.

    Args:
        tokenizer: the tokenizer of the images, in evaluation mode.
        encoder: encoder of the task.
        images: the images.
        names: of the classes; without any, the annotations are captions.
        make: function that fills the details in; it must not contain a collective.
    """
    config, ids = encoder.details, None
    if config is None:
        return None
    count = len(images.annotations)
    if images.encoded.file is not None and count:
        some = (_looked_at(config), config.reconstructions)
        rows = sorted({row for each in some for row in spread(count, each)})
        ids = dict(zip(rows, _gather_ids(images.encoded, rows, tokenizer, encoder.partition), strict=True))
    with encoder.partition.raise_on_all_ranks():
        if encoder.partition.rank:
            return None
        try:
            texts = [names[each] if names else each[0] for each in images.annotations]
            return make(ImageDetails(encoder, tokenizer, images, texts, ids))
        except StopRequested:
            raise
        except Exception as error:  # of any kind, also a device that runs out of memory
            told = f"{type(error).__name__}: {error}"
            logger.warning("evaluation: no details for the report, the figures are not affected: %s", told)
            return None


class ImageDetails:
    """Maker of the details of n encoded images, on rank 0.

    Args:
        encoder: encoder that has encoded the images, with details.
        tokenizer: the tokenizer of the images, in evaluation mode.
        images: the images.
        texts: ``n`` texts, the first caption or the class of each image.
        ids: row → ids ``(N, C)``, -1 where absent, of the rows that need them; None without codes.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: ImageTokenizer,
        images: EncodedImages,
        texts: Sequence[str],
        ids: Mapping[int, Tensor] | None,
    ):
        assert encoder.details is not None
        self.config = encoder.details
        self._tokenizer, self._images, self._texts, self._ids = tokenizer, images, texts, ids
        self._reader = ImageReader(images.source, tokenizer.transform, self.config.thumbnail)

    def examples(
        self,
        queries: Tensor,
        candidates: Tensor,
        query_group: Tensor,
        group: Tensor,
        ranks: Ranks,
        direction: Direction,
        texts: Sequence[str],
    ) -> tuple[Section, ...]:
        """Return the misses and hits of a search of Q queries among M candidates.

        Args:
            queries: ``(Q, E)`` unit-norm.
            candidates: ``(M, E)`` unit-norm.
            query_group: ``(Q,)`` int64, see `vqclip.evaluation.ranking.rank`; of captions, the row of their image.
            group: ``(M,)`` int64.
            ranks: what `rank` returned.
            direction: queries and candidates.
            texts: text of each candidate; of captions to images, of each query.
        """
        finds_images = direction == "caption to image"

        def candidate(place: int, score: float, right: bool) -> Item:
            note = f"{'✓ right' if right else '✗ wrong'} · {score:.2f}"
            if finds_images:
                return self._reader.item(self._index(place), note, right)
            return Item(text=clip_text(texts[place]), note=note, right=right)

        def card(row: int) -> Card:
            scores = (queries[row] @ candidates.T).cpu()
            right = (group == query_group[row]).cpu()
            order = (scores.double() / SAME).round().argsort(stable=True, descending=True)
            nearest = order[: self.config.nearest]
            found = map(candidate, nearest.tolist(), scores[nearest].tolist(), right[nearest].tolist())
            text, place = texts[row if finds_images else int(order[right[order]][0])], int(ranks.place[row])
            asked = []
            if not finds_images:
                asked.append(self._reader.item(self._index(row)))
            elif place > 1:  # otherwise it is the first that is found
                asked.append(self._reader.item(self._index(int(query_group[row])), "the right one"))
            return Card(
                title=clip_text(text if direction == "image to class" else f"“{text}”"),
                note=f"the right {direction.rpartition(' ')[2]} is number {place:,} of {len(candidates):,}",
                items=(*asked, *found),
            )

        chosen = zip(("clearest hits", "worst misses"), choose_examples(ranks, self.config, direction), strict=True)
        return tuple(
            Section(layout="found", title=f"From {direction}: {what}", cards=tuple(map(card, rows)))
            for what, rows in reversed([*chosen])
            if rows
        )

    def codes(self) -> tuple[Section, ...]:
        """Return code maps and galleries; empty without codes, and where images have any shape."""
        rows = spread(len(self._texts), _looked_at(self.config))
        if self._ids is None or not rows or self._tokenizer.has_shapes:
            return ()
        every, grid = codebook_names(self._tokenizer.quantizer), token_grid(self._tokenizer)
        names, columns = every[:MAX_CODEBOOKS], find_grid(len(self._ids[0]))[1]
        cards = []
        for row in (rows[place] for place in spread(len(rows), self.config.code_maps)):
            panels = [code_map(ids, columns) for ids in self._ids[row].T[: len(names)].tolist()]
            if columns > 1 and None not in panels:
                items = [Item(image=each, text=name) for each, name in zip(panels, names, strict=True)]
                cards.append(Card(items=(self._reader.item(self._index(row)), *items)))
        some = "" if len(names) == len(every) else f" (the first {len(names)} of {len(every)})"
        sizes = Counter(self._tokenizer.codebook_sizes[: len(names)]).items()
        note = f"One colour a code, one panel a codebook{some}; equal colours of one codebook are equal codes. "
        note += ", ".join(f"{count_noun(count, 'codebook')} of {size:,} codes" for size, count in sizes) + "."
        if grid is None:
            note += " The tokens of this model have no place in the image: a panel shows them in their order."
        maps = [Section(layout="maps", note=note, cards=tuple(cards))] if cards else []
        galleries = () if grid is None or not self.config.gallery_codes else self._galleries(rows, names, grid)
        return (*maps, *galleries)

    def _galleries(self, rows: list[int], names: list[str], grid: tuple[int, int]) -> Iterator[Section]:
        """Yield for each codebook the codes in the most images of ``rows``, with the patches of their tokens."""
        config, ids = self.config, self._ids_of(rows)
        for number, name in enumerate(names[: config.gallery_codebooks]):
            cards = []
            for code, images, places in shared_codes(ids[..., number], config.gallery_codes, config.gallery_patches):
                seen = [(self._reader.pixels(self._index(rows[row])), token) for row, token in places]
                cut = [
                    exact_thumbnail(_cut(each, grid, token), config.thumbnail)
                    for each, token in seen
                    if each is not None
                ]
                if kept := tuple(Item(image=each) for each in cut if each is not None):
                    cards.append(Card(note=f"code {code:,}, in {images:,} of {len(rows):,} images", items=kept))
            if cards:
                yield Section(layout="patches", title=name, cards=tuple(cards))

    def reconstructions(self) -> Section | None:
        """Return images beside what their ids decode to; None without codes or a pixel decoder."""
        tokenizer, rows = self._tokenizer, spread(len(self._texts), self.config.reconstructions)
        if self._ids is None or tokenizer.pixels is None or not rows:
            return None
        indices, ids = [self._index(row) for row in rows], self._ids_of(rows)
        if tokenizer.pixels.detail is not None:  # the stored ids are the tokenizer's own
            seen = [self._reader.pixels(index) for index in indices]
            blank = torch.zeros(3, *[tokenizer.tower.image_size] * 2, dtype=torch.uint8)
            shown = torch.stack([blank if each is None else each for each in seen])
            ids = torch.cat((ids, tokenizer.encode_detail(shown).cpu()), dim=-1)
        reader = ImageReader(self._images.source, pixel_transform(tokenizer), self.config.thumbnail)
        found = [
            show_reconstruction(tokenizer, own, reader, index, self._texts[row])
            for row, index, own in zip(rows, indices, ids, strict=True)
        ]
        return Section(layout="decoded", cards=tuple(each[0] for each in found if each is not None))

    def _index(self, row: int) -> int:
        """Return the number of a row's image in the source."""
        return int(self._images.indices[row])

    def _ids_of(self, rows: Sequence[int]) -> Tensor:
        """Return the ids ``(m, N, C)`` of some of the rows that have them."""
        assert self._ids is not None
        return torch.stack([self._ids[row] for row in rows])


def spread(count: int, some: int) -> list[int]:
    """Return at most ``some`` of ``count`` rows, evenly spread."""
    some = min(count, some)
    return [number * count // some for number in range(some)]


def _looked_at(config: DetailsConfig) -> int:
    """Return the number of images for code maps and galleries."""
    return max(config.code_maps, config.gallery_images if config.gallery_codes else 0)


def _gather_ids(encoded: Encoded, rows: list[int], tokenizer: ImageTokenizer, partition: RankPartition) -> Tensor:
    """Gather the stored ids ``(m, N, C)`` of ascending rows of a set; every rank must call this with the same rows."""
    with partition.raise_on_all_ranks():
        assert encoded.file is not None
        assert encoded.rows is not None
        mine = torch.isin(encoded.rows, torch.tensor(rows, dtype=torch.int64))
        ids = load_ids(encoded.file, tokenizer.codebook_sizes)[mine].to(tokenizer.device, torch.int64)
        places = encoded.rows[mine].to(tokenizer.device)
    order = partition.gather(places).argsort()
    return partition.gather(ids)[order].cpu()


def codebook_names(quantizer: Quantizer) -> list[str]:
    """Return the name of each codebook, such as ``stage 2`` or ``stage 1, codebook 3``, counted from 0."""
    whole = quantizer.extent
    return [
        ", ".join(
            f"{word} {number}"
            for word, number, most in zip(("stage", "codebook"), place, whole, strict=True)
            if most > 1 or (word == "codebook" and max(whole) == 1)
        )
        for place in quantizer.places
    ]


def token_grid(tokenizer: ImageTokenizer) -> tuple[int, int] | None:
    """Return rows and columns of an image's tokens; None if they were reduced and have no place in the image.

    A tower sees square images, and its tokens are patches in the order of reading.
    """
    side = round(tokenizer.num_tokens**0.5)
    return (side, side) if tokenizer.reduce is None and side * side == tokenizer.num_tokens else None


def shared_codes(ids: Tensor, some: int, patches: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return the codes of one codebook that occur in the most images, at least two; of equal ones the most used.

    Args:
        ids: ``(m, N)`` int64, -1 where absent.
        some: number of codes.
        patches: number of places of each.

    Returns:
        Each code, the number of images that contain it, and its places: row of ``ids``, and its first token with it.
    """
    codes, which = ids.unique(return_inverse=True)
    contains = torch.zeros(len(ids), len(codes), dtype=torch.bool).scatter_(1, which, True)
    images, uses = contains.sum(0), which.flatten().bincount(minlength=len(codes))
    order = (images * (1 + ids.numel()) + uses).argsort(stable=True, descending=True)
    order = order[(codes[order] >= 0) & (images[order] > 1)][:some]
    found = []
    for code in order.tolist():
        rows = contains[:, code].nonzero()[:patches, 0]
        tokens = (which[rows] == code).to(torch.uint8).argmax(dim=1)  # the first of several
        places = list(zip(rows.tolist(), tokens.tolist(), strict=True))
        found.append((int(codes[code]), int(images[code]), places))
    return found


def _cut(pixels: Tensor, grid: tuple[int, int], token: int) -> Tensor:
    """Return the pixels of a token, ``(3, h, w)``."""
    (rows, columns), (height, width) = grid, pixels.shape[1:]
    row, column = divmod(token, columns)
    return pixels[
        :,
        row * height // rows : max(row * height // rows + 1, (row + 1) * height // rows),
        column * width // columns : max(column * width // columns + 1, (column + 1) * width // columns),
    ]


def choose_examples(ranks: Ranks, config: DetailsConfig, direction: Direction) -> tuple[list[int], list[int]]:
    """Return the rows of hits and of misses; equal ones are in the order of the set.

    Hits are queries whose right candidate is first, those with the largest lead over the best wrong one. Misses are
    those with the worst rank, then the largest lead of the best wrong candidate; of classes by that lead alone, so that
    the first is the most confidently wrong.

    Args:
        ranks: places of the right candidates.
        config: numbers of hits and misses.
        direction: misses of classes are sorted by confidence, the others by rank.
    """
    # Rounded, so that the last bits of a score, which differ between numbers of ranks, do not decide.
    lead = ((ranks.best.double() - ranks.best_wrong.double()).clamp(-2, 2) / SAME).round()
    by_lead = lead.argsort(stable=True, descending=True)
    hits = by_lead[(lead > 1)[by_lead] & (ranks.above == 0)[by_lead]]
    order = lead.argsort(stable=True)
    if direction != "image to class":
        order = order[ranks.place[order].argsort(stable=True, descending=True)]
    misses = order[ranks.place[order] > 1]
    return hits[: config.hits].tolist(), misses[: config.misses].tolist()


def class_accuracies(names: Sequence[str], labels: Tensor, hits: Mapping[Mode, Tensor]) -> Table:
    """Return the accuracy of each class that has images, lowest first; of too many classes, of the first ones.

    Args:
        names: of the K classes.
        labels: ``(n,)`` int64.
        hits: mode → ``(n,)`` in [0, 1]; the last mode decides which accuracies are lowest.
    """
    present, which, counts = labels.unique(return_inverse=True, return_counts=True)
    rates = {
        mode: torch.zeros(len(counts), dtype=torch.float64).index_add_(0, which, each) / counts
        for mode, each in hits.items()
    }
    lowest = list(rates.values())[-1].argsort(stable=True)[:MAX_CLASSES]
    heads = ("class", "images", *(f"{MODE_TITLES[mode]}, %" for mode in rates))
    rows = tuple(
        (
            clip_text(names[int(present[row])]),
            f"{int(counts[row]):,}",
            *(percent(float(each[row])) for each in rates.values()),
        )
        for row in lowest.tolist()
    )
    return Table(title="Accuracy by class: the lowest", heads=heads, rows=rows, left=1)


def largest_confusions(names: Sequence[str], labels: Tensor, predicted: Tensor) -> Table:
    """Return the confusions with the most images, most first.

    Args:
        names: of the classes.
        labels: ``(n,)`` int64.
        predicted: ``(n,)`` int64; of equally near classes the first one.
    """
    wrong = labels != predicted
    pairs, images = (labels * len(names) + predicted)[wrong].unique(return_counts=True)
    order = images.argsort(stable=True, descending=True)[:MAX_CONFUSED]
    shown = [clip_text(name) for name in names]
    rows = tuple(
        (shown[pair // len(names)], shown[pair % len(names)], f"{count:,}")
        for pair, count in zip(pairs[order].tolist(), images[order].tolist(), strict=True)
    )
    return Table(title="Largest confusions", heads=("class", "taken for", "images"), rows=rows, left=2)
