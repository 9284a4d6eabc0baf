"""Measurements on which a layout depends, by the units of its stages."""

from megapipe.layout.measurements import Measurements
from megapipe.plan.freed import freed_by_input_grad
from megapipe.plan.moe.time import chosen_form

BY_UNITS = Measurements(freed_by_input_grad, chosen_form)
