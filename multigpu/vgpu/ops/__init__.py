"""Operations on virtual tensors: what each costs, where its result lies, which errors it raises."""
