"""The diagnosis for a reader without a browser."""

from __future__ import annotations

from harness.diagnose.page.markdown import to_markdown as to_markdown
