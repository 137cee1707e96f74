"""Statistics, samples and soft probabilities from the logits."""

from dgemma_kernels.ops.vocabulary.kernel import (
    Shaping,
    SoftProbabilities,
    VocabularyStatistics,
    pack_allowed,
    sample,
    soft_probabilities,
    vocabulary_statistics,
)

__all__ = [
    "Shaping",
    "SoftProbabilities",
    "VocabularyStatistics",
    "pack_allowed",
    "sample",
    "soft_probabilities",
    "vocabulary_statistics",
]
