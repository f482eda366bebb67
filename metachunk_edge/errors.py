"""Everything that metachunk-edge raises on purpose.

Each message is one sentence (or two) for the person who made the call: what was wrong, the value, and
what to do. Errors of the engines below (llama.cpp, pip, the file system) are turned into these at the
seam, with `raise … from error`; the command line prints the message and exits with code 1.

    MetachunkError
    ├── SettingsError (also ValueError)   a setting outside its valid range
    ├── DocumentError                     an input that cannot be read as text
    ├── ScoresError                       a scores file that does not fit its document, or is cut short
    ├── ModelError                        a model that cannot be found, trusted or loaded
    │   ├── ModelNotFoundError            no such catalogue name or file, or not downloaded yet
    │   ├── ModelFileError                a file that is cut short, altered or of an unsupported kind
    │   ├── DownloadError                 every source of a catalogue entry failed
    │   └── ConversionError               a checkpoint that cannot be converted, or lost its accuracy on the way
    ├── ParityError                       two models that cannot be compared, e.g. for their token ids differ
    ├── MissingExtraError                 a part of the package whose optional dependencies are not installed
    └── BackendError                      the inference engine failed while it was scoring
        └── DeviceError                   the asked-for device is not there in this build or machine

And one warning, which the command line prints as a note:

    DeviceWarning                         a device gives wrong values, and the model runs on the CPU instead
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ConversionError",
    "DeviceError",
    "DeviceWarning",
    "DocumentError",
    "DownloadError",
    "MetachunkError",
    "MissingExtraError",
    "ModelError",
    "ModelFileError",
    "ModelNotFoundError",
    "ParityError",
    "ScoresError",
    "SettingsError",
]


class MetachunkError(Exception):
    """The root: catch this to catch everything that metachunk-edge raises on purpose."""


class SettingsError(MetachunkError, ValueError):
    """A setting is outside its valid range; the message names the value and the range."""


class DocumentError(MetachunkError):
    """An input is missing, unreadable, not text, or not in the stated encoding."""


class ScoresError(MetachunkError):
    """A scores file is cut short, of another format, or belongs to another text."""


class ModelError(MetachunkError):
    """A model cannot be found, trusted or loaded."""


class ModelNotFoundError(ModelError):
    """The name is neither in the catalogue nor a file, or the entry has not been downloaded yet."""


class ModelFileError(ModelError):
    """The model file is cut short, altered, or of a kind that the backend cannot run."""


class DownloadError(ModelError):
    """Every source of a catalogue entry failed; the message says why for each."""


class ConversionError(ModelError):
    """The source cannot be converted, or what was written lies outside the tolerance of its precision."""


class ParityError(MetachunkError):
    """Two models cannot be compared; the message says where they part."""


class MissingExtraError(MetachunkError):
    """Optional dependencies are not installed; the message names the extra to install."""


class BackendError(MetachunkError):
    """The inference engine failed while it was scoring."""


class DeviceError(BackendError):
    """The asked-for device does not exist in this build or on this machine."""


class DeviceWarning(UserWarning):
    """A device gives wrong values for a model, which runs on the CPU instead; the message says how wrong."""
