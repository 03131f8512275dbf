"""The process that workers without torch are forked from imports this module (`evoattn.evaluation.server`)."""

from evoattn.evaluation.imports import import_for_compiling

import_for_compiling()
