"""From annotated pictures to batches on their way to the device."""
