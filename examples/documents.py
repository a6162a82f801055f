"""A pipeline that fans out: each page of a document is read in parallel, a child workflow translates it.

Run it: ``python -m examples.documents``.
"""

from __future__ import annotations

import asyncio

from holdfast import App, context

app = App(name="documents")


@app.step(repeatable=True)
def split(document: str) -> list[str]:
    """A computation: it may run again after a crash, and costs no write of its own."""
    return [page.strip() for page in document.split("|")]


@app.step(retries=3, timeout="1m")
async def read_page(page: str) -> list[str]:
    return page.split()


@app.step(repeatable=True)
def merge(pages: list[str]) -> str:
    return " / ".join(pages)


@app.step(retries=3)
async def translate_word(word: str) -> str:
    return word.upper()


@app.workflow
async def translate(words: list[str]) -> str:
    return " ".join(await asyncio.gather(*[translate_word(word) for word in words]))


@app.workflow
async def process(document: str) -> str:
    pages = await split(document)
    context().set(pages=str(len(pages)))
    async with asyncio.timeout(3600):  # durable: it counts over crashes and restarts
        read = await asyncio.gather(*[read_page(page) for page in pages])
        translated = await asyncio.gather(*[translate(words) for words in read])
    return await merge(list(translated))


def main() -> None:
    with app.runner():
        run = process.submit("one page | and another | and the last")
        print(run.result(timeout=60))


if __name__ == "__main__":
    main()
