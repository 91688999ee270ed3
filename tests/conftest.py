"""Settings of the whole suite."""

import torch

# The problems of the tests are small: threads would only wait for each other.
torch.set_num_threads(1)
