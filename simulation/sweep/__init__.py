"""A sweep: many settings of a virtual fleet side by side, what looking at them costs, and the job of one."""
