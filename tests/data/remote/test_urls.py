"""Which URLs are read at all, and what of them is shown."""

import sys
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.data.making import caption_shards
from vqclip.data import CaptionShardsConfig
from vqclip.data.remote.files import RemoteShard, remote_shards
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import beneath, digest, display_url, mask_credentials, redact_message
from vqclip.data.sources.paths import find_shards
from vqclip.errors import DataError, StorageError

SECRET = "https://me:pass word1@host/a/0.tar?sig=s3cr3t&part=2&bare"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pipe:curl -H 'Bearer s3cr3t' https://host/x.tar", "pipe:...: commands are not run"),
        ("PIPE:rm", "commands are not run"),
        ("zip://*::https://host/x.zip", "chains of protocols (::) are not read"),
        ("zip::https://host/x.zip", "chains of protocols and URLs inside paths are not read"),
        ("https://host/x.tar::file:///etc/passwd", "chains of protocols (::) are not read"),
        ("ftp://me:s3cr3t@host/x.tar", "ftp://host/x.tar: protocol ftp is not read"),
        ("ssh://host/x.tar", "ssh is not read; expected a local path or a URL of one of file, http, https, s3"),
        ("reference://x", "protocol reference is not read"),
        ("{http,ftp}://host/x.tar", "URLs inside paths are not read"),
        ("file://server/x.tar", "names the host 'server'; expected file:///path"),
        ("https:///x.tar", "names no host"),
        ("s3://", "names no bucket"),
        ("https://host/a b.tar", "write %20"),
        ("https://me:s3'cr3t@host/a.tar?sig=s3cr3t", "write %20, %5C, %27"),
        ('https://host/a".tar', "%22"),
        ("https://host/<a>.tar", "%3C or %3E"),
        ("s3://bucket/a b's.tar", "rename it"),
        ("https://host/a\nb.tar", "control characters"),
        ("https://host/train/", "https cannot list folders; name the shards: https://host/{00000..00041}.tar"),
        ("https://host/{0..99999999}.tar?sig=s3cr3t", "more than 10000000 numbers"),
        ("https://host/{0..9999}{0..9999}.tar?sig=s3cr3t", "?... ["),
    ],
)
def test_what_is_refused(path: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        find_shards([path])
    assert message in str(error.value)
    assert "s3cr3t" not in str(error.value)
    assert "\n" not in str(error.value)


def test_braces_make_urls_in_order() -> None:
    shards = find_shards(["https://host/{00..02}.tar?a={x,y}"])
    assert [shard.url for shard in shards] == [f"https://host/0{n}.tar?a={a}" for n in range(3) for a in "xy"]
    assert [shard.name for shard in shards[:2]] == ["00.tar", "00.tar"]
    assert len({digest(shard.url) for shard in shards}) == 6
    assert find_shards(["http://[::1]:80/0.tar"])[0].name == "0.tar"
    with pytest.raises(DataError, match="listed twice"):
        find_shards(["https://host/0.tar", "https://host/{0,1}.tar"])


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "a b", (1, 2))
    expected = find_shards([folder])
    assert find_shards([f"file://{folder}/{{00000..00001}}.tar"]) == expected
    assert find_shards([f"file://{str(folder).replace(' ', '%20')}"]) == expected
    assert find_shards([f"FILE://localhost{folder}/*.tar"]) == expected


def test_credentials_are_not_shown() -> None:
    end = f" [{digest(SECRET)[:12]}]"
    assert display_url(SECRET) == "https://host/a/0.tar?..." + end
    assert display_url("https://host/a/0.tar") == "https://host/a/0.tar"
    assert display_url("/local/a?b.tar") == "/local/a?b.tar"
    shard = RemoteShard(SECRET, RemoteConfig())
    assert str(shard) == display_url(SECRET)
    said = f"{SECRET}: me:pass word1 and s3cr3t at sig=s3cr3t&part=2&bare, s3://you:pw@b?x=y\n\x1b"
    for text in (redact_message(said, SECRET), str(shard), repr(shard)):
        for secret in ("s3cr3t", "pass word1", "pw@", "x=y"):
            assert secret not in text


HIDDEN = {
    "https://joe:s3cr3t@host/0.tar": "https://host/0.tar",
    "https://s3cr3t@host/0.tar": "https://host/0.tar",
    "https://joe%3As3cr3t%40host/0.tar": "https://host/0.tar",
    "https://joe:s3c@r3t:s3cr3t@host/0.tar": "https://host/0.tar",
    "https://joe:h/n%ter@host/0.tar": "https://...host/0.tar",
    "https://joe:h%2Fn%25ter@host/0.tar": "https://host/0.tar",
    "https://joe:pa's3cr3t@host/0.tar?sig=s3cr3t": "https://host/0.tar?...",
    'https://joe:pa"s3cr3t@host/0.tar?sig=s3cr3t': "https://host/0.tar?...",
    "https://joe:<s3cr3t>@host/0.tar?sig=<s3cr3t": "https://host/0.tar?...",
    "https://joe:s3cr3t?x@host/0.tar": "https://...?...",
    "https://joe:12?s3cr3t@host/0.tar": "https://...?...",
    "https://joe:s3cr3t#x@host/0.tar": "https://...#...",
    "https://joe:s3cr3t": "https://...",
    "https://host/a/https://joe:s3cr3t@other/0.tar": "https://...other/0.tar",
    "https://host/a@b/0.tar": "https://host/a@b/0.tar",
    "https://host:8080/a/0.tar": "https://host:8080/a/0.tar",
    "https://joe:s3cr3t@[::1]:80/0.tar": "https://[::1]:80/0.tar",
    "s3://joe:s3cr3t/s3cr3t@bucket/0.tar": "s3://...bucket/0.tar",
    "https://host/0.tar?X-Amz-Signature=s3cr3t&X-Amz-Date=2026": "https://host/0.tar?...",
    "https://host/0.tar?s3cr3t==": "https://host/0.tar?...",
    "https://host/0.tar?next=https://joe:s3cr3t@other/?x=y": "https://host/0.tar?...",
    "https://host/0.tar#token=s3cr3t": "https://host/0.tar#...",
    "https://host/0.tar#a?sig=s3cr3t": "https://host/0.tar#...",
    "https://host/0.tar?a=b#s3cr3t": "https://host/0.tar?...",
    "https://host/0.tar%3Fsig%3Ds3cr3t": "https://host/0.tar%3F...",
    "https://host/0.tar%253Fsig%253Ds3cr3t": "https://host/0.tar%253F...",
    "https://host/0.tar%23s3cr3t": "https://host/0.tar%23...",
    "HTTPS://joe:s3cr3t@host/0.tar": "HTTPS://host/0.tar",
    "https:/joe:s3cr3t@host/0.tar": "https:/host/0.tar",
}


@pytest.mark.parametrize("url", HIDDEN)
def test_what_is_left_of_a_url(url: str) -> None:
    hidden = HIDDEN[url]
    assert display_url(url) == hidden + (f" [{digest(url)[:12]}]" if hidden != url else "")
    for before, after in (("", ""), ("got '", "' (str)"), ('{"path": "', '"}'), ("see ", ": HTTP 503, again")):
        assert mask_credentials(f"{before}{url}{after}") == f"{before}{hidden}{after}"
    assert mask_credentials(hidden) == hidden
    tree = {"a": [url, 3, None, {"b": (url,)}], "c": "s3cr3t of its own"}
    assert mask_credentials(tree) == {"a": [hidden, 3, None, {"b": [hidden]}], "c": "s3cr3t of its own"}
    for text in (url, unquote(url), unquote(unquote(url)), quote(url, "")):
        told = redact_message(f"GET {text} failed", url)
        assert not any(secret in told for secret in ("s3cr3t", "h/n%ter", "h%2Fn")), told


@pytest.mark.parametrize("word", ["a", "a://", "https://", "https://,", "%25", "1:", "a'"])
def test_long_text_takes_linear_time(word: str) -> None:
    """Where it were quadratic, this would outlast the suite."""
    text = word * (200_000 // len(word))
    for each in (text, f"x {text}", f"x https://{text}", f"x https://joe:s3cr3t@host/?{text}"):
        assert "s3cr3t" not in mask_credentials(each)


def test_a_whole_url_ends_where_the_text_does() -> None:
    """Only within a sentence are quotes and commas at the end taken for those of the sentence."""
    assert mask_credentials("https://joe:s3cr3t'") == mask_credentials("https://joe:s3cr3t,") == "https://..."
    assert mask_credentials("https://host/0.tar?s3cr3t',s3cr3t") == "https://host/0.tar?..."


def test_short_names_and_values_do_not_garble_messages() -> None:
    url = "https://a:pw@host/0.tar?part=2&sig=YWJjZGVm="
    plain = "HTTP 502: a bad gateway at 22 pwned hosts"
    assert redact_message(plain, url) == plain
    told = redact_message("user a with password pw: sig YWJjZGVm= or YWJjZGVm%3D", url)
    assert told == "user a with password ...: sig ... or ..."
    assert redact_message("token t0k", "https://t0k@host/0.tar") == "token ..."


def test_the_cache_is_keyed_by_all_of_a_url_and_its_query_stays_at_the_end() -> None:
    assert len({digest(url) for url in HIDDEN}) == len(HIDDEN)
    assert RemoteShard("https://host/0.tar#x?sig=s3cr3t").name == "0.tar"
    assert beneath("https://host/a#sig=s3cr3t", "0.tar") == "https://host/a/0.tar#sig=s3cr3t"
    assert beneath("https://host/a/?sig=x", "b/0.tar") == "https://host/a/b/0.tar?sig=x"
    assert beneath("s3://bucket/a", "b") == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://bucket/0.tar", "s3fs", "s3"), ("gs://b/0.tar", "gcsfs", "gs"), ("az://b/0.tar", "adlfs", "az")],
)
def test_a_missing_package_is_named(url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StorageError) as error:
        CaptionShardsConfig(path=url).build()
    assert f"needs the package {package}: pip install 'vqclip[{extra}]'" in str(error.value)
    with pytest.raises(StorageError, match=f"pip install 'vqclip\\[{extra}\\]'"):
        remote_shards(url.replace("0.tar", "folder"), RemoteConfig())
