"""A web app around a client: notes that are on the daemon's disk when the browser has its answer.

    python examples/web.py 8000
    curl -d '{"text": "buy milk"}' -H 'content-type: application/json' localhost:8000/notes
    curl localhost:8000/notes

It needs `pip install fastapi uvicorn`. The app starts before its daemon, and outlives it: meanwhile it answers 503.
"""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, TypedDict

import uvicorn
from fastapi import Depends, FastAPI, Request, status
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from dep2p.client import (
    Client,
    DaemonUnreachableError,
    QueueNotFoundError,
)

QUEUE = "notes"


class State(TypedDict):
    """The objects that all requests share."""

    client: Client


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncGenerator[State]:
    """Open one client for the app. It makes no connection before the first call."""
    async with Client.open(call_reconnect_s=2) as client:
        yield {"client": client}


def shared_client(request: Request) -> Client:
    """Return the client that `lifespan` opened."""
    client: Client = request.state.client
    return client


SharedClient = Annotated[Client, Depends(shared_client)]


class NewNote(BaseModel):
    """The body of a POST."""

    text: str = Field(min_length=1, max_length=1_000)


class StoredNote(BaseModel):
    """A note as the queue has it."""

    id: str
    text: str


app = FastAPI(title="Notes", lifespan=lifespan)


@app.exception_handler(DaemonUnreachableError)
async def answer_503(_request: Request, error: Exception) -> JSONResponse:
    """Say that a later try may succeed. A note that was not confirmed may be there all the same."""
    return JSONResponse({"detail": str(error)}, status.HTTP_503_SERVICE_UNAVAILABLE, {"retry-after": "1"})


@app.post("/notes", status_code=status.HTTP_201_CREATED)
async def add_note(note: NewNote, client: SharedClient) -> StoredNote:
    """Store a note. It is on disk when this answers."""
    body = note.text.encode()
    try:
        note_id = await client.queues.publish(QUEUE, body)
    except QueueNotFoundError:  # the very first note
        await client.queues.create(QUEUE)
        note_id = await client.queues.publish(QUEUE, body)
    return StoredNote(id=note_id, text=note.text)


@app.get("/notes")
async def list_notes(client: SharedClient, count: int = 10) -> list[StoredNote]:
    """List the oldest notes, without taking them."""
    try:
        found = await client.queues.peek(QUEUE, count=count)
    except QueueNotFoundError:
        return []
    return [StoredNote(id=each.id, text=each.body.decode()) for each in found]


@app.get("/members")
async def list_members(client: SharedClient) -> dict[str, str]:
    """List the members of the realm and their states."""
    return {member.peer: member.state for member in await client.members()}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit(__doc__)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
