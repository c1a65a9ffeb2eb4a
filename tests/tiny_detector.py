"""A Mask2Former with tiny random weights, saved as the folders of published models are."""

import json

import torch
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

LABELS = {0: "cup", 1: "mouse", 2: "dining table"}


def tiny_detector(folder, seed=0):
    """Save a Mask2Former for three of COCO's classes, with images scaled to 64 pixels."""
    torch.manual_seed(seed)
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(
            image_size=64,
            patch_size=4,
            window_size=2,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[1, 1, 2, 2],
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        id2label=LABELS,
        label2id={name: number for number, name in LABELS.items()},
    )
    model = Mask2FormerForUniversalSegmentation(config)
    model.class_predictor.weight.data.normal_(0, 1.0)  # new weights give every class the same probability
    model.save_pretrained(folder)
    preprocessing = {
        "image_processor_type": "Mask2FormerImageProcessor",
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
        "size": {"shortest_edge": 64, "longest_edge": 96},
        "size_divisor": 32,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "ignore_index": 255,
        "num_labels": len(LABELS),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder
