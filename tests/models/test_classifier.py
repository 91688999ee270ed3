"""Image classifiers: what they read, what they share with an image model, and that they learn."""

import pytest
import torch
from image_cases import images, model

from implicit_attention.models import ImageClassifier
from implicit_attention.models.image import PatchEmbedding


def test_a_classifier_reads_cls_by_the_norm_and_two_layers():
    made, pictures = model(mode="published", scale=0.5), images(2)
    classifier = ImageClassifier(made, 4, hidden=6)
    tokens = made.block(made.embedding(made.patches(pictures)))
    first, _, last = classifier.head
    cls = made.block.norm(tokens[:, 0])
    expected = (cls @ first.weight.T + first.bias).relu() @ last.weight.T + last.bias
    torch.testing.assert_close(classifier(pictures), expected, rtol=1e-12, atol=1e-12)
    logits, solution = classifier(pictures, return_solution=True)
    assert torch.equal(logits, classifier(pictures))
    assert solution.value.shape == (2, 7, 5)
    assert classifier(pictures[0]).shape == (4,)


def test_a_classifier_shares_its_parts_with_the_image_model():
    made = model()
    classifier = ImageClassifier(made, 4)
    assert classifier.embedding is made.embedding
    assert classifier.block is made.block
    names = {name.split(".")[0] for name, _ in classifier.named_parameters()}
    assert names == {"embedding", "block", "head"}
    with pytest.raises(TypeError, match="`image_model` must be an ImageEnergyTransformer, got PatchEmbedding"):
        ImageClassifier(PatchEmbedding(4, 2, 1, 5), 4)
    with pytest.raises(ValueError, match="`classes` must be >= 1"):
        ImageClassifier(made, 0)
