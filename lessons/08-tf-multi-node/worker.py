"""Train on several machines, in plain TensorFlow; one_machine.py trains on one.

TF_CONFIG='…' python lessons/08-tf-multi-node/worker.py weights.npz
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG, waits for all
is_chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0

tf.keras.utils.set_random_seed(0)
digits = load_digits()
images = digits.images.reshape(-1, 64).astype("float32") / 16
labels = digits.target
train = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
batches = train.shuffle(1440, seed=0).batch(120)
batches = strategy.experimental_distribute_dataset(batches)

layers = tf.keras.layers
with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.Input((64,)), layers.Dense(64, activation="tanh"), layers.Dense(10)]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
        loss = tf.reduce_sum(losses) / 120
    optimizer.apply(tape.gradient(loss, model.trainable_variables))


for _ in range(10):
    for batch in batches:
        strategy.run(step, args=batch)

# The others end now. If the chief ended before them, they would report an error.
if is_chief:
    accuracy = np.mean(np.argmax(model(images[1440:]), axis=1) == labels[1440:])
    print(f"{strategy.num_replicas_in_sync} replicas, test accuracy {accuracy:.2f}")
    np.savez(sys.argv[1], *model.get_weights())
