"""Checkpoints from the Hugging Face hub, through its client and its cache."""

from pathlib import Path

from models.errors import ModelError

_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
_NESTED = ["*/*"]


def fetch_snapshot(name: str, *, weights: bool, offline: bool) -> Path:
    """Directory of hub model `name`; only what the engine reads is fetched.

    Raises ModelError with one line if the name is unknown, access is refused, the network is unreachable, or the
    model is not in the cache and `offline` is set.
    """
    from httpx import HTTPError
    from huggingface_hub import errors, snapshot_download

    patterns = _DESCRIPTION + (_WEIGHTS if weights else [])
    try:
        found = snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NESTED, local_files_only=offline)
    except errors.GatedRepoError as error:
        raise ModelError(f"hub model {name!r} needs its terms accepted and a token (HF_TOKEN)") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"hub model {name!r} does not exist, or needs a token (HF_TOKEN)") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{name!r} is not a valid hub name") from error
    except errors.LocalEntryNotFoundError as error:
        why = "the hub is switched off" if offline else "the hub cannot be reached"
        raise ModelError(f"hub model {name!r} is not in the local cache, and {why}") from error
    except (errors.HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        raise ModelError(f"hub model {name!r} could not be fetched: {type(error).__name__}: {error}") from error
    return Path(found)
