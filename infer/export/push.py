"""Uploading to the Hugging Face hub: an exported folder, or what decoding needs of a run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa.checkpoint import MANIFEST, read_manifest
from medusa.eagle_files import eagle_place, read_eagle_manifest
from medusa.errors import UserError, reason

from ..source import PATTERNS, is_ours

CARD, CONFIG = "README.md", "config.json"
# Of a run: what decoding fetches, without logs, reports and checkpoints of its training. (A star crosses folders.)
OF_A_RUN = [CARD if pattern == "*.md" else pattern for pattern in PATTERNS]
NEVER = [".*", "**/.*"]  # what is not whole yet, and others' hidden files
REASON = 160  # characters of what the hub says


def push(folder: Path, repo: str, *, private: bool = False, update: bool = False, message: str | None = None) -> str:
    """Upload ``folder`` to the new model repository ``repo``, or with ``update`` to one that is there.

    Returns the repository's address.

    Raises:
        UserError: a folder that is not to be uploaded, a name that is none, no token, no network, or what the hub says.
    """
    from huggingface_hub import HfApi

    patterns, what = _contents(folder)
    api = HfApi()
    with _told(folder, repo):
        made = api.create_repo(repo, private=private or None, exist_ok=update, repo_type="model")
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            allow_patterns=patterns,
            ignore_patterns=NEVER,
            commit_message=message or f"Upload {what}",
        )
    return str(made)


@contextmanager
def _told(folder: Path, repo: str) -> Iterator[None]:
    """What the hub and its client raise, as UserError with the way out."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"--repo {repo}: {_said(error)}: give NAME or OWNER/NAME") from error
    except LocalTokenNotFoundError as error:
        raise UserError("the hub needs a token to write with: `hf auth login`, or set HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set, so nothing is uploaded: unset it") from error
    except HfHubHTTPError as error:
        raise UserError(_refused(error, repo)) from error
    except ValueError as error:  # of the card's front matter, by the hub's own rules
        raise UserError(f"{folder / CARD}: {_said(error)}: mend what stands between its --- lines") from error
    except (HTTPError, OSError) as error:
        raise UserError(f"the hub can't be reached ({_said(error)}): try again where there is a network") from error


def _contents(folder: Path) -> tuple[list[str] | None, str]:
    """Which files go up, None for all of them, and what they are."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give one made by `medusa export` or `medusa train`")
    if is_ours(folder):
        return OF_A_RUN, _run(folder)
    if not (folder / CONFIG).is_file() or not (folder / CARD).is_file():
        raise UserError(
            f"{folder} is neither made by `medusa export` ({CONFIG} and {CARD}) nor a run ({MANIFEST}): give one"
        )
    base = _config(folder).get("base_model_name_or_path")
    if isinstance(base, str) and (Path(base).is_absolute() or base.startswith(".")):
        raise UserError(
            f"{folder / CONFIG} names the trunk {base}, a folder here that nobody else has: export again with --base"
            " and the hub id of the trunk"
        )
    return None, "heads for speculative decoding"


def _run(folder: Path) -> str:
    """What a run holds; each part of it has its trunk on the hub, or in the run."""
    parts = []
    if (folder / MANIFEST).is_file():
        heads = read_manifest(folder)
        _check_trunk(folder, folder, heads.trunk, heads.local)
        parts.append(f"{heads.heads.kind} heads")
    if (place := eagle_place(folder)) is not None:
        layer = read_eagle_manifest(place)
        _check_trunk(folder, place, layer.trunk, layer.local)
        parts.append("an EAGLE layer")
    return f"{' and '.join(parts)} for speculative decoding"


def _check_trunk(folder: Path, place: Path, trunk: str, local: bool) -> None:
    if local and (place / trunk).resolve().parent != folder.resolve():
        raise UserError(
            f"{place} names the trunk {trunk}, a folder outside of the run, which is not uploaded with it: upload the"
            " trunk by itself and train with its hub id"
        )


def _config(folder: Path) -> dict[str, object]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} can't be read ({reason(error)}): export the heads again") from error
    return found if isinstance(found, dict) else {}


def _said(error: Exception) -> str:
    """All of it in one line: the first one is often but a heading."""
    return textwrap.shorten(str(error) or reason(error), REASON, placeholder=" ...")


def _refused(error: Exception, repo: str) -> str:
    """What to do about the hub's own refusals, by the code of its answer."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code == 401:
        return "the hub does not know this token, or there is none: `hf auth login`, or set HF_TOKEN"
    if code == 409:
        return f"the repository {repo} exists: add --update for a new commit in it, or give another name with --repo"
    if code == 403:
        return f"this token may not write to {repo}: give one of role write, or a repository of your own with --repo"
    return f"the hub refuses ({_said(error)}): see what it asks for, and try again"
