"""Measured values that a layout depends on, computed from the measured costs of its stages."""

from megapipe.layout.measurements import Measurements
from megapipe.plan.activation_split import freed_by_input_grad
from megapipe.plan.moe.moe_layer_time import chosen_form

BY_UNITS = Measurements(freed_by_input_grad, chosen_form)
