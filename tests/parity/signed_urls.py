"""URLs with a secret, and a file system that opens them."""

from __future__ import annotations

SECRET = "s3cret"
SIGNED = "https://example.org/texts.txt?X-Amz-Date=1&X-Amz-Signature=s3cret"

WEB = """
import io
import fsspec

TEXT = b"the cat sat on a mat and ran away " * 400

class Web(fsspec.AbstractFileSystem):
    versions = {"ETag": "1"}

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def info(self, path, **given):
        if "s3cret" not in path:
            raise FileNotFoundError(f"403, url='{path}'")
        return {"name": path, "size": len(TEXT), "type": "file", **self.versions}

    def _open(self, path, mode="rb", **given):
        return io.BytesIO(TEXT)

fsspec.register_implementation("https", Web, clobber=True)
"""
"""A web server that answers requests that have the secret."""
