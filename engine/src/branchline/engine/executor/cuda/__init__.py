"""The executor `torch-cuda`: a decoder whose step is queued on a GPU without waiting for it.

`device` is the only place that knows streams, events, pinned memory and graphs; `staging` and `graphs` keep their
rules; `step` lays a batch out for the device; `decoder` and `ops` are the model; `engine` ties them. All of it runs on
a CPU by the same code, which is how it is tested.
"""
