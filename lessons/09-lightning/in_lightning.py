"""Run the lesson's experiments on two ranks, with this Trainer and with Lightning.

python lessons/09-lightning/in_lightning.py
"""

import argparse

from experiments import compare, show

from multigpu import launch


def main(args: argparse.Namespace) -> None:
    show(*compare())


if __name__ == "__main__":
    launch.start(main, argparse.Namespace())
