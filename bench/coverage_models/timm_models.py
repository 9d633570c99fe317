"""One or two models of each of timm's families."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.coverage_models.common import ROWS, SIDE, Factory, Made, prepare, quick_init
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

TIMM_ANY_SIZE = """
caformer_s18 convmixer_768_32 convnext_atto cpubone_nano crossvit_9_240 cs3darknet_s csatv2 davit_tiny densenet121
dla46x_c dpn48b ecaresnet26t edgenext_xx_small efficientformer_l1 efficientnet_lite0 efficientvit_b0
ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gemma4_vit_167m gernet_s ghostnet_050 halonet26t
hgnetv2_b0 hrnet_w18_small inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnet_050 lcnetv2_small
legacy_seresnet18 legacy_xception lowformer_b0 mambaout_femto mixnet_s mobilenetv3_small_050 mobilenetv4_conv_small
mobilevit_xxs mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nextvit_small nfnet_l0
poolformer_s12 pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50d
resnest14d resnet18 resnetv2_18 rexnet_100 sam2_hiera_tiny samvit_base_patch16_224 selecsls42b sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 tresnet_m twins_svt_small xception41 xcit_nano_12_p16_224
""".split()  # noqa: SIM905
"""One or two of each family that takes images of any size."""

TIMM_SIZED = """
beit_base_patch16_224 cait_xxs24_224 coat_lite_tiny convit_tiny deit3_small_patch16_224 deit_tiny_distilled_patch16_224
deit_tiny_patch16_224 efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224 flexivit_small gcvit_xxtiny
gmlp_ti16_224 hiera_tiny_224 levit_128s maxvit_pico_rw_256 mixer_s32_224 nest_tiny pit_ti_224 resmlp_12_224
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 tnt_s_patch16_224 visformer_tiny
vit_relpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224
""".split()  # noqa: SIM905
"""Families that are built for one size of image, `img_size`."""

TIMM_SIZES = {
    "efficientformer_l1": 224,
    "halonet26t": 256,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
}
"""The side of an image in pixels, for models that do not take 64."""


def timm_model(name: str) -> Made:
    """Return timm's model `name` with four images."""
    declare_detection_operators()
    import timm

    # A smaller image trains just as much of the network in a fraction of the time.
    side = TIMM_SIZES.get(name, SIDE)
    options: dict[str, Any] = {"img_size": side} if name in TIMM_SIZED else {}
    with quick_init():
        model = timm.create_model(name, num_classes=10, **options)
    return prepare(model), (torch.randn(ROWS, 3, side, side),), {}


TIMM: dict[str, Factory] = {name: partial(timm_model, name) for name in (*TIMM_ANY_SIZE, *TIMM_SIZED)}
