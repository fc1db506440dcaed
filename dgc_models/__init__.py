"""Models for small images, for language and for translation. Those for ImageNet are torchvision's."""

from dgc_models.alexnet_cifar import alexnet as alexnet
from dgc_models.densenet_cifar import densenet121 as densenet121
from dgc_models.densenet_cifar import densenet169 as densenet169
from dgc_models.digits_cnn import DigitsCNN as DigitsCNN
from dgc_models.gpt import GPT as GPT
from dgc_models.lstm import LSTM as LSTM
from dgc_models.resnet_cifar import resnet18 as resnet18
from dgc_models.resnet_cifar import resnet20 as resnet20
from dgc_models.resnet_cifar import resnet50 as resnet50
from dgc_models.resnet_cifar import resnet56 as resnet56
from dgc_models.resnet_cifar import resnet101 as resnet101
from dgc_models.resnet_cifar import resnet110 as resnet110
from dgc_models.senet_cifar import senet18 as senet18
from dgc_models.transformer import Transformer as Transformer
from dgc_models.transformer import transformer_base as transformer_base
from dgc_models.transformer import transformer_big as transformer_big
from dgc_models.vgg_cifar import vgg16_bn as vgg16_bn
from dgc_models.vgg_cifar import vgg19_bn as vgg19_bn
