"""Readers of ids: loaded from the folder, without the tower."""

import pytest
import torch

import vqclip
from tests.models import IDENTITY, tiny_model
from vqclip.errors import ShapeError, VqclipError
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.stored import fingerprint

TWO = ["a red star", "x"]


def readers(folder):
    return {name: vqclip.load_tokenizer(folder, name, encode=False) for name in ("image", "text")}


def test_a_reader_is_the_half_of_the_tokenizer_that_reads(saved):
    model, folder = saved
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    for name, reader in readers(folder).items():
        whole = getattr(model, name)
        ids = whole.encode(images if name == "image" else TWO)
        assert type(reader) is TokenizerDecoder
        assert not reader.training
        assert torch.equal(reader.decode(ids), whole.decode(ids))
        assert torch.equal(reader.embed(ids), whole.embed(ids))
        for fact in ("modality", "num_tokens", "fewest_tokens", "codebook_sizes", "bits_per_sample", "embed_dim"):
            assert getattr(reader, fact) == getattr(whole, fact)
        theirs, ours = whole.state_dict(), reader.state_dict()
        assert set(theirs) - set(ours) == {key for key in theirs if key.startswith(("tower.", "project_in."))}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_reader_does_not_encode(saved):
    reader = readers(saved[1])["text"]
    with pytest.raises(
        VqclipError, match=r'loaded with encode=False.*expected load_tokenizer\(folder, modality="text"'
    ):
        reader.encode(TWO)
    with pytest.raises(VqclipError, match=r"has no fingerprint.*to build or search an index"):
        fingerprint(reader)  # it covers the tower
    with pytest.raises(ShapeError, match=r"ids: got shape \(1, 13, 1\), expected \(B, 1 to 12, 1\)"):
        reader.decode(torch.zeros(1, 13, 1, dtype=torch.int64))


def test_a_reader_without_codes_says_so(tmp_path):
    tiny_model(IDENTITY).build().save_pretrained(tmp_path)
    with pytest.raises(ShapeError, match="Identity has no codebook"):
        vqclip.load_tokenizer(tmp_path, "image", encode=False).decode(torch.zeros(1, 4, 0, dtype=torch.int64))
