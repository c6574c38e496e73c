"""The command `sedem serve`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sedem.cli import output
from sedem.cli.options import (
    EngineOption,
    ReaderModelOption,
    ReaderOption,
    option_of,
    reader_at,
    settings_of,
)
from sedem.config import DEFAULT_MODEL
from sedem.endpoint import is_loopback
from sedem.errors import ConfigError
from sedem_serve.server.settings import LIMITS, ServerSettings

if TYPE_CHECKING:
    from sedem.bank.file import Place

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
"""Packages of the extra `serve`."""
FOLDER = Path("~/.sedem")


_setting = partial(option_of, ServerSettings)


def serve(
    context: typer.Context,
    model: Annotated[str, _setting("model", "MODEL", "--model", "-m")] = DEFAULT_MODEL,
    bank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PLACE",
            help="A bank that clients may query but not change: a file of `sedem build`, or a "
            "place such as s3://BUCKET/NAME; repeatable.",
        ),
    ] = None,
    folder: Annotated[Path, _setting("folder", "FOLDER")] = FOLDER,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file of API keys, as --new-key writes it; SIGHUP reads it again. Without "
            "it, there is one key: SEDEM_API_KEY, or one that is generated and printed.",
        ),
    ] = None,
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Add a key to the --keys file, print its secret once, and exit."
        ),
    ] = None,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="With --new-key: the key may ask, but not upload or delete."
        ),
    ] = False,
    bank_scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --new-key: a bank that the key may ask, or a prefix such as 'team-*'; "
            "repeatable. [default: all]",
        ),
    ] = None,
    host: Annotated[str, _setting("host", "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, _setting("port", "N")] = 8000,
    engine: EngineOption = "auto",
    memory: Annotated[str | None, _setting("memory", "SIZE")] = None,
    cors: Annotated[list[str] | None, _setting("cors", "ORIGIN")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N", help=f"Change a limit; repeatable. The names: {', '.join(LIMITS)}."
        ),
    ] = None,
    log_format: Annotated[str, _setting("log_format", "NAME")] = "text",
    log_text: Annotated[bool, _setting("log_text", None, "--log-text")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Answer on the machines of a Ray cluster: HOST:PORT of its head node, auto, or "
            "local. [default: on this machine]",
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --ray: parts of each bank's keys. [default: 1]"),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --ray: replicas that answer. [default: 1]"),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --ray: replicas of each part. [default: 1]"),
    ] = None,
    reader: ReaderOption = None,
    reader_model: ReaderModelOption = None,
    telemetry: Annotated[bool, _setting("telemetry", None, "--telemetry")] = False,
) -> None:
    """Serve a page and an API that OpenAI clients can call.

    Upload documents on the page or by POST /v1/banks/NAME/documents, ask, and see from which spans
    an answer came. Every route but /health needs a key. Ctrl-C lets running answers end.
    """
    # A key, in place of a server
    if new_key is not None:
        from sedem_serve.server.keys import ALL_BANKS, add_key

        if keys is None:
            raise ConfigError("--new-key needs --keys FILE, the file that the key is added to")
        output.write(add_key(keys, new_key, banks=bank_scope or ALL_BANKS, write=not read_only))
        output.note(f"'{keys}' holds only its SHA-256, so this is the only time that it is shown")
        return
    if read_only or bank_scope:
        raise ConfigError("--read-only and --bank-scope require --new-key")
    names = ("partitions", "engines", "copies")
    machines = {n: count for n in names if (count := context.params[n]) is not None}
    if machines and ray is None:
        raise ConfigError(f"--{next(iter(machines))} belongs to --ray; add it")
    if reader_at(reader, reader_model) and ray is not None:
        raise ConfigError("--reader answers on this machine; leave --ray out")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"`sedem serve` needs {', '.join(missing)}; run pip install 'sedem[serve]'"
        )
    # Settings
    given = {
        name: value
        for name, value in context.params.items()
        if name in ServerSettings.model_fields and value is not None
    }
    from sedem.bank.file import is_remote
    from sedem.bank.memory_bank import store_at

    banks: dict[str, Place] = {}
    for entry in bank or ():
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"bank '{entry}' is not of the form NAME=PLACE")
        if name in banks:
            raise ConfigError(f"2 banks are named '{name}'; give each a name of its own")
        banks[name] = path if is_remote(path) else Path(path).expanduser()
    given |= {"banks": banks, "folder": folder.expanduser(), "key_file": keys}
    settings = ServerSettings(**given | settings_of(limit, "limit", LIMITS))
    for place in settings.banks.values():
        store_at(place).meta()  # refused here, not after the model is open
    if not is_loopback(host):
        output.note(
            f"{host} can be reached from elsewhere, and keys travel in the clear; put a proxy with "
            "TLS in front"
        )
    # Here, or on the machines of a cluster
    if ray is None:
        from sedem_serve.server.run import run

        run(settings, _announce)
    else:
        from sedem_serve.ray import serving

        serving.run(settings, serving.Machines(**machines), ray, _announce)


def _announce(address: str, secret: str | None) -> None:
    """Show where the page is; with a key that was made for this run, this is the only time."""
    output.write(f"the page: {address}{'' if secret is None else f'?key={secret}'}")
    output.write(f"the API:  {address}v1")
    if secret is not None:
        output.write(f"the key:  {secret} (for this run; see --keys)")
