"""KServe API of an ingress: the Open Inference Protocol over gRPC, with the tensors of Triton's LLM back ends."""
