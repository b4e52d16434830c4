import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path

from PIL import Image

from tests.data.making import encode, pixels


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *, before: bytes = b"") -> bytes:
    """A PNG of these raw rows; ``rows`` are compressed here, ``before`` are chunks in front of them."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + png_chunk(b"IDAT", zlib.compress(rows, 9)) + png_chunk(b"IEND", b"")


def huge_png(side: int) -> bytes:
    """side x side black pixels of one bit, some kilobytes for 20,000."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + -(-side // 8))) for _ in range(side)) + packer.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def zeros_packed(size: int) -> bytes:
    """zlib's form of so many zeros (a multiple of 1 MiB), a thousandth of them, made without having them."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">I", (size % 65521) << 16 | 1)
    return b"\x78\xda" + block * (size >> 20) + b"\x03\x00" + checksum


def text_bomb_png() -> bytes:
    """A pixel, and a text chunk that unpacks to 1 GiB."""
    return png(1, 1, 8, 2, bytes(4), before=png_chunk(b"zTXt", b"Comment\0\0" + zeros_packed(1 << 30)))


def profile_bomb_png() -> bytes:
    """A pixel, and a colour profile that unpacks to 1 GiB."""
    return png(1, 1, 8, 2, bytes(4), before=png_chunk(b"iCCP", b"icc\0\0" + zeros_packed(1 << 30)))


def data_bomb_png() -> bytes:
    """A pixel, whose data unpack to 1 GiB."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zeros_packed(1 << 30)) + png_chunk(b"IEND", b"")


def huge_jpeg(side: int) -> bytes:
    """A small JPEG whose header says side x side."""
    data = bytearray(encode(pixels(0), "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, side, side)
    return bytes(data)


def two_sizes(kind: str, side: int) -> bytes:
    """An image of side x side whose first size, for a careless reader, is 8 x 8."""
    data = encode(pixels(0, side, side), kind)
    if kind == "PNG":  # the second header counts
        return data[:8] + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)) + data[8:]
    at = data.index(b"\xff\xc0")  # FF 00 is no marker, and a comment holds no header
    frame, fake = data[at : at + 19], b"\xff\xc0" + struct.pack(">HBHH", 17, 8, 8, 8) + data[at + 9 : at + 19]
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(fake)) + fake
    return data[:2] + b"\xff\0" + struct.pack(">H", 2 + len(frame) + 4) + frame + comment + data[2:at] + data[at + 19 :]


def exif_bomb(kind: str, fields: int = 100) -> bytes:
    """A turned image whose EXIF fields all name the same megabyte."""
    if kind == "TIFF":
        data = encode(pixels(0, 8, 16), kind)
        (at,) = struct.unpack_from("<I", data, 4)
        directory = data[at + 2 : at + 2 + 12 * data[at]]
        directory += b"".join(struct.pack("<HHII", 0x9000 + field, 1, 1 << 20, len(data)) for field in range(fields))
        names = struct.pack("<H", len(directory) // 12) + directory + bytes(4)
        return data[:4] + struct.pack("<I", len(data) + (1 << 20)) + data[8:] + bytes(1 << 20) + names
    whole = fields * 12 + (1 << 20)
    names = b"".join(struct.pack("<HHII", 0x200 + field, 1, 1 << 20, 14 + fields * 12) for field in range(fields - 1))
    turned = struct.pack("<HHII", 0x0112, 3, 1, 6)
    exif = b"II*\0" + struct.pack("<IH", 8, fields) + turned + names + bytes(whole - fields * 12 + 4)
    if kind == "AVIF":  # whose encoder reads the fields too
        place = Image.Exif()
        place[0x9286] = bytes(len(exif))
        data = encode(pixels(0, 8, 16), kind, exif=place.tobytes())
        at = data.index(place.tobytes()[6:10])
        return data[:at] + exif + data[at + len(exif) :]
    return encode(pixels(0, 8, 16), kind, exif=exif)


def scans_jpeg(scans: int, side: int = 16) -> bytes:
    """A progressive JPEG, to which empty refinements of all its pixels are added until it has so many scans."""
    data = encode(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    # Huffman table 0: one code of one bit for a run of 2^14 blocks. A scan: AC 1 to 63, first bits, all blocks empty.
    table = b"\xff\xc4" + struct.pack(">HB16B", 20, 0x10, 1, *[0] * 15) + b"\xe0"
    header = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0x00, 1, 63, 0x00)
    runs = -(-((side // 8) ** 2) // (1 << 14))
    pixels = bytes(-(-15 * runs // 8))
    return data[:-2] + table + (header + pixels) * (scans - data.count(b"\xff\xda")) + b"\xff\xd9"


def lying_webp(side: int) -> bytes:
    """A WebP whose outer header says 8 x 8 and whose picture is side x side."""
    inner = encode(Image.new("RGB", (side, side)), "WEBP", lossless=True)[12:]
    outer = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (7).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 4 + len(outer) + len(inner)) + b"WEBP" + outer + inner


def animated(kind: str) -> bytes:
    first, second = Image.fromarray(pixels(0)), Image.fromarray(pixels(1))
    return encode(first, kind, save_all=True, append_images=[second])


class Marker:
    """Whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def marking_pickle(marker: Path) -> bytes:
    """A pickle that makes the folder ``marker`` when it is read by `pickle.load`, `torch.load` or `numpy.load`."""
    return pickle.dumps(Marker(marker))


def sparse_tar(path: Path, claims: int) -> Path:
    """GNU's old form: a member of no bytes that unpacks to ``claims`` zeros."""
    info = tarfile.TarInfo("000000000.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % claims
    return _with_sum(path, header)


def boastful_tar(path: Path, claims: int) -> Path:
    """A plain member that says it has ``claims`` bytes, in a file of 10 KB."""
    info = tarfile.TarInfo("000000000.txt")
    info.size = claims
    return _with_sum(path, bytearray(info.tobuf(tarfile.USTAR_FORMAT)))


def with_checksum(data: bytearray, at: int = 0) -> bytearray:
    """The data, with a checksum that fits in the tar header at a place."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return data


def _with_sum(path: Path, header: bytearray) -> Path:
    path.write_bytes(bytes(with_checksum(header)) + bytes(10_240 - len(header)))
    return path


def gzip_bomb_tar(path: Path, claims: int) -> Path:
    """A tar of a member of ``claims`` zeros, gzipped twice: once leaves a thousandth."""
    info = tarfile.TarInfo("000000000.txt")
    info.size = claims
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = packer.compress(info.tobuf(tarfile.USTAR_FORMAT)) + packer.flush(zlib.Z_FULL_FLUSH)
    once = b"\x1f\x8b\x08" + bytes(7) + head + block * (claims >> 20) + b"\x03\x00" + bytes(8)
    path.write_bytes(gzip.compress(once, mtime=0))  # the same bytes at any time
    return path


def tar_with(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], kind: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of these members, whatever their names and types."""
    with tarfile.open(path, "w", format=kind) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
