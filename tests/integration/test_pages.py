"""The command blocks of README and docs that need Kafka and Redis."""

from pathlib import Path

import pytest

from tests.cli.pages import PAGES, blocks, folder_of, run

pytestmark = pytest.mark.timeout(900)


@pytest.mark.usefixtures("local_kafka", "redis_url")  # skips without Java; the page starts its own
def test_the_blocks_that_need_kafka_run_as_they_stand(tmp_path: Path) -> None:
    found = {page.stem: blocks(page.read_text()) for page in PAGES}
    pages = [page for page in found.values() if any(block.word == "kafka" for block in page)]
    # A block with `fresh` stops the system of docs/distributed.md.
    pages.sort(key=lambda page: (page is not found["distributed"], any("fresh" in block.text for block in page)))
    with folder_of(tmp_path) as folder:
        run([block for page in pages for block in page if block.word == "kafka" or block.is_file], folder)
