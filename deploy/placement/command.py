"""`millrace deploy render PLATFORM FILE`: a placement file in the form of a platform, on standard output.

A platform is a function in `RENDERERS`, from a plan and an image to a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.placement import compose, helm, ray_service
from deploy.placement.given import check_plan, load_placement
from deploy.placement.image import DEMO_IMAGE, IMAGE, RAY_IMAGE, ImageSource
from deploy.placement.plan import DeploymentPlan

RENDERERS: Mapping[str, Callable[[DeploymentPlan, ImageSource], str]] = {
    "compose": compose.render,
    "helm": helm.render,
    "ray": ray_service.render,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace deploy`."""
    parser.add_argument("action", choices=("render",), help="print the file to give to the platform")
    parser.add_argument("platform", choices=tuple(RENDERERS), help="which platform")
    parser.add_argument("placement", type=load_placement, metavar="FILE", help="a placement file (docs/placement.md)")
    parser.add_argument(
        "--image",
        help=f"the image that runs (default: {IMAGE}; {DEMO_IMAGE} where no model is named; ray: {RAY_IMAGE})",
    )
    parser.add_argument(
        "--build-context", metavar="FOLDER", help="build the image from the checkout in this folder where it is missing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print it; the process's exit code. Raises ValueError for what the platform cannot have."""
    plan: DeploymentPlan = arguments.placement
    check_plan(plan, apart=arguments.platform == "helm")
    if plan.model is not None and not plan.model.startswith("/") and Path(plan.model).exists():
        raise ValueError(f"model = {plan.model!r} is here: name it by its whole path, or it is looked for at the hub")
    default = RAY_IMAGE if arguments.platform == "ray" else DEMO_IMAGE if plan.model is None else IMAGE
    image = ImageSource(name=arguments.image or default, context=arguments.build_context)
    sys.stdout.write(RENDERERS[arguments.platform](plan, image))
    return 0
