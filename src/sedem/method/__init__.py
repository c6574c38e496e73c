"""The method of the paper. Read the files in this order to follow its equations.

    segments    section 3    a document as segments of T tokens
    compressor  section 3.1  eq. 1, hidden states at the extraction layer; mixtures of layers; eq. 2
                             to 4, means of C states and memory slots; variants: an MLP, learned
                             queries (eq. 19)
    selector    section 3.2  eq. 5 to 7, scores of memory blocks and the K best
    injection   section 3.3  eq. 8, slots as decoder states; variants: identity, soft tokens; they
                             enter the decoder above the injection layer
    losses      section 4    eq. 9 to 11 and 13; appendix Selection Supervision, eq. 16 to 18

Elsewhere: blocks of N_B slots (section 3.2) in `bank.blocks`, the objectives of both stages (eq. 12
and 14) in `sedem_lab.training.stage1` and `stage2`, LoRA (eq. 15) in `backbone.decoder`.
"""
