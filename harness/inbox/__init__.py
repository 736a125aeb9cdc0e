"""The inbox's contract: what an input is and when two are the same."""

from harness.inbox.images import ImageFacts, recognise_image
from harness.inbox.inbox import (
    INPUT_SCHEMA_VERSION,
    MAX_INLINE_TEXT_BYTES,
    TEXT_MEDIA_TYPE,
    blob_ref,
    externalise,
    externalise_parts,
    fingerprint,
    image_digests,
    normalise_input,
    validate_input,
    with_image_facts,
)

__all__ = [
    "INPUT_SCHEMA_VERSION",
    "MAX_INLINE_TEXT_BYTES",
    "TEXT_MEDIA_TYPE",
    "ImageFacts",
    "blob_ref",
    "externalise",
    "externalise_parts",
    "fingerprint",
    "image_digests",
    "normalise_input",
    "recognise_image",
    "validate_input",
    "with_image_facts",
]
