"""``dpagent data …``: a look at the records on a device, before any of them is trained on."""
