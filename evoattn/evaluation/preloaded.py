"""The process that workers are forked from imports this module."""

from evoattn.evaluation.imports import import_for_all

import_for_all()
